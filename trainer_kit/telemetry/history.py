"""metrics.jsonl: one line per report, and the history that is left of it when resumes and rollbacks are counted in.

A line is strict JSON: a metric that is NaN or infinite is written as the text "nan", "inf" or "-inf" and read back as
a float. Lines are only ever appended. A run that goes back to step N says so with {"kind": "resume", "step": N}.

Every line is handed to the operating system at once, so that the death of the process loses none. It is not forced to
the disk one by one: that would cost milliseconds each, and a power failure takes the steps since the last checkpoint
anyway. `flush` does force it; called before a checkpoint, it makes the history at least as new as the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError, suggestion
from trainer_kit.scalars import flat_scalars
from trainer_kit.telemetry.report import Report

RESUME = "resume"
_RATES = ("steps_per_second", "examples_per_second", "seconds")


class JsonLinesWriter:
    """Appends reports to a file of JSON lines; makes the file and its folder with the first one.

    Args:
      path: local.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stream: IO[bytes] | None = None

    def write(self, report: Report) -> None:
        """Appends {"kind", "step", "steps_per_second", "examples_per_second", "seconds", "metrics"}.

        `metrics` are the report's scalars, groups and names joined by "/".

        Raises:
          StorageError: when the file cannot be written.
        """
        record: dict[str, Any] = {"kind": report.kind, "step": int(report.step)}
        record.update({name: _encode(getattr(report, name)) for name in _RATES})
        record["metrics"] = {name: _encode(value) for name, value in flat_scalars(report.metrics).items()}
        self._append(record)

    def resume(self, step: int) -> None:
        """Notes that the run goes on from `step`: what was written for later steps counts no more.

        Call it once at every start and rollback, before the first report, with 0 for a start from nothing. It writes
        nothing where there is no history yet.

        Raises:
          StorageError: when the file cannot be written.
        """
        if self._stream is not None or os.path.exists(self.path):
            self._append({"kind": RESUME, "step": int(step)})

    def flush(self) -> None:
        """Forces what was written to the disk.

        Raises:
          StorageError: when that fails.
        """
        if self._stream is None:
            return
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except Exception as error:
            raise _storage_error(self.path, error) from error

    def close(self) -> None:
        """Flushes and closes the file; a second call does nothing, a later report opens it again."""
        try:
            self.flush()
        finally:
            stream, self._stream = self._stream, None
            # What closing can fail on, flush has told already.
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.close()

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            if self._stream is None:
                self._stream = _open_to_append(self.path)
            self._stream.write(line)
            self._stream.flush()
        except Exception as error:
            raise _storage_error(self.path, error) from error


class History(list[dict[str, Any]]):
    """Records of reports in the order of their steps, each as it is in the file; every metric is a float."""

    def get_history(self, name: str, kind: str | None = None) -> list[tuple[int, float]]:
        """Returns (step, value) of the metric `name` wherever it was reported, in the order of the steps.

        Args:
          name: a metric, as "group/name" if it is in a group; or "steps_per_second", "examples_per_second", "seconds".
          kind: "train" or "validation" to look at these reports only.

        Raises:
          UsageError: when no report has it, with the nearest names.
        """
        records = [record for record in self if kind in (None, record["kind"])]
        values = [(record["step"], _named(record)[name]) for record in records if name in _named(record)]
        if not values:
            known = sorted({known for record in records for known in _named(record)})
            raise UsageError(f"no report has a metric {name!r}; {suggestion(name, known)}")
        return values

    def get_latest(self, name: str, kind: str | None = None) -> float:
        """Returns the newest value of the metric `name`.

        Raises:
          UsageError: when no report has it, with the nearest names.
        """
        return self.get_history(name, kind)[-1][1]


def active_history(path: str | os.PathLike[str]) -> History:
    """Returns the reports in the file at `path` that count: no (kind, step) twice, steps never going back.

    A resume at step N takes away what was reported for later steps; so does a training report for a step before the
    last one, which is a resume that was not noted. An evaluation of an earlier step takes its place among the others.
    Of two reports for one step of one kind the later counts. Lines that a crash cut, and what is no report, are left
    out. There is no history, and no error, where there is no file.
    """
    history = History()
    for record in _records(os.fspath(path)):
        kind, step = record["kind"], record["step"]
        if kind in (RESUME, "train"):
            while history and history[-1]["step"] > step:
                history.pop()
        if kind != RESUME:
            _insert(history, _decode(record))
    return history


def _insert(history: History, record: dict[str, Any]) -> None:
    place = len(history)
    while place > 0 and history[place - 1]["step"] >= record["step"]:
        place -= 1
        if history[place]["step"] == record["step"] and history[place]["kind"] == record["kind"]:
            del history[place]
    end = place
    while end < len(history) and history[end]["step"] == record["step"]:
        end += 1
    history.insert(end, record)


def _records(path: str) -> Iterator[dict[str, Any]]:
    for record in files.read_lines(path):
        step = record.get("step")
        if isinstance(record.get("kind"), str) and isinstance(step, int) and not isinstance(step, bool):
            yield record


def _open_to_append(path: str) -> IO[bytes]:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    cut = target.exists() and target.stat().st_size > 0 and not _ends_with_newline(target)
    local = open(target, "ab")  # noqa: SIM115 -- kept open from report to report
    if cut:
        local.write(b"\n")
    return local


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _encode(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _decode(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = record.get("metrics")
    rates = {name: _as_float(record[name]) for name in _RATES if record.get(name) is not None}
    numbers = {name: _as_float(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    return {**record, **rates, "metrics": numbers}


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _named(record: Mapping[str, Any]) -> dict[str, float]:
    rates = {name: record[name] for name in _RATES if record.get(name) is not None}
    return {**rates, **record["metrics"]}


def _storage_error(path: str, error: Exception) -> StorageError:
    return StorageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}")
