"""SetFromFile: sets hyper-parameters from a file that a person edits while the run continues."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import JsonValue

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import UsageError
from trainer_kit.evals.ledger import REWIND, active_records, read_records

# In model_dir.
RECORD_FILE = "hyper_parameters.jsonl"
_LOG = logging.getLogger(__name__)
# A value that JSON can store.
_JsonT = TypeVar("_JsonT")


class SetFromFile(Callback):
    """Reads a file before each training loop and sets the values that have changed in it.

    The file is YAML, one line for each value: `learning_rate: 0.001`. The file need not exist. A
    file that cannot be used only causes a warning, so that a typing mistake does not end a run.
    Removing a line changes nothing.

    Each reading that changed something is recorded in hyper_parameters.jsonl, before it is used. A
    run that is killed and resumes from an earlier checkpoint makes these changes again at the
    recorded steps, and reads the file only after the last of them. Changes after the step of a
    rewind no longer count, and the file is read at once.

    Args:
      path: The file. A relative path is relative to model_dir.
    """

    name: str = "set_from_file"
    # With several workers, each worker sets its own variable. Only the chief reads and records.
    chief_only = False

    def __init__(self, path: str = "hyper_parameters.yaml") -> None:
        self._path = path
        # The text and the values of the last reading.
        self._text = ""
        self._values: dict[str, float] = {}
        # Recorded readings of a process that was killed, to repeat at their steps.
        self._pending_readings: list[dict[str, Any]] = []

    def train_begin(self, run: Run) -> None:
        """Takes over the recorded readings."""
        self._load_readings(run)

    def rewound(self, run: Run, step: int) -> None:
        """Takes over the recorded readings that still count."""
        del step
        self._load_readings(run)

    def next_boundary(self, step: int) -> int | None:
        """Returns the step of the next reading to repeat, or None."""
        for record in self._pending_readings:
            record_step = int(record["step"])
            if record_step > step:
                return record_step
        return None

    def loop_begin(self, run: Run, steps: int) -> None:
        """Repeats the recorded readings of this step. Reads the file when no reading is left."""
        del steps
        while self._pending_readings and self._pending_readings[0]["step"] <= run.step:
            reading = self._pending_readings.pop(0)
            self._set(run, reading["values"])
        if self._pending_readings:
            return

        # Only the chief reads the file, so that all workers make the same changes.
        changes: dict[str, float] = {}
        if run.is_chief:
            changes = self._read_changes(run)
        changes = _broadcast_json(run, changes)
        self._set(run, changes)

    def _load_readings(self, run: Run) -> None:
        """Splits the readings that count into those before this step and those to repeat."""
        readings: list[dict[str, Any]] = []
        if run.is_chief:
            record_path = os.path.join(run.directory, RECORD_FILE)
            records = files.read_json_lines(record_path)
            records_of_file = [record for record in records if record["file"] == self._path]
            # The rewinds in the ledger decide which of them still count.
            rewinds = _read_rewinds(run.directory)
            readings = active_records([*rewinds, *records_of_file])
        readings = _broadcast_json(run, readings)

        self._text = ""
        self._values = {}
        self._pending_readings = []
        for record in readings:
            if record["step"] < run.step:
                self._values.update(record["values"])
            else:
                self._pending_readings.append(record)

    def _set(self, run: Run, values: Mapping[str, float]) -> None:
        self._values.update(values)
        source = os.path.basename(self._path)
        for name, value in values.items():
            run.change(name, value, source)

    def _read_changes(self, run: Run) -> dict[str, float]:
        """Returns and records the values of the file that have changed since the last reading."""
        path = os.path.join(run.directory, self._path)
        try:
            with open(path, encoding="utf-8") as stream:
                text = stream.read()
            if text == self._text:
                return {}
            self._text = text
            parsed = yaml_loader.parse(text, path)
            values = _check_values(parsed.values, run)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, UsageError) as error:
            _LOG.warning("%s changes nothing: %s; edit it again", path, error)
            return {}

        changes: dict[str, float] = {}
        for name, value in values.items():
            if self._values.get(name) != value:
                changes[name] = value
        if not changes:
            return {}

        # The record comes before the use of the values, so that a resume can repeat the changes.
        rewinds = _read_rewinds(run.directory)
        lineages = [rewind["lineage"] for rewind in rewinds]
        record = {
            "step": run.step,
            "lineage": max(lineages, default=0),
            "file": self._path,
            "values": changes,
        }
        record_path = os.path.join(run.directory, RECORD_FILE)
        files.append_json_line(record_path, record)
        return changes


def _check_values(values: JsonValue, run: Run) -> dict[str, float]:
    """Returns the content of the file: numbers by the name of their hyper-parameter.

    Raises:
      UsageError: when an entry is not the name of a hyper-parameter with a number that its variable
        can store.
    """
    # An empty file gives None.
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{values!r:.60} is not a value with its name; write lines such as learning_rate: 0.001"
        )

    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{name}: {value!r:.60} is not a number")
        run.hyper_parameters.check(str(name), value)
        numbers[str(name)] = float(value)
    return numbers


def _read_rewinds(directory: str) -> list[dict[str, Any]]:
    ledger = os.path.join(directory, "evals", "validation.jsonl")
    records = read_records(ledger)
    return [record for record in records if record.get("kind") == REWIND]


def _broadcast_json(run: Run, value: _JsonT) -> _JsonT:
    """Returns the chief's value on every worker."""
    # This imports TensorFlow, which the module itself does not need.
    from trainer_kit.runtime.collectives import broadcast_text

    text = broadcast_text(run.trainer.strategy, json.dumps(value))
    return json.loads(text)
