"""The evaluation ledger: an append-only file with one line per evaluation.

The module also contains pure functions over the records of a ledger.

A record is {"step", "checkpoint", "dataset", "metrics", "seconds", "config_hash", "lineage"}.
`lineage` counts the rewinds of the run (rollback, a start from an earlier step). A rewind is a
separate line, {"kind": "rewind", "lineage", "step"}, and supersedes the records of earlier lineages
for later steps. A restart after a kill is not a rewind. Its evaluations repeat recorded numbers and
are not written again.

Lines are strict JSON. A metric that is NaN or infinite is written as the text "nan", "inf" or
"-inf" and read back as a float.
"""

from __future__ import annotations

import copy
import glob
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, cast

from trainer_kit import files
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.scalars import (
    as_scalar,
    flatten_scalars,
    from_json_number,
    to_json_number,
)

REWIND = "rewind"
_LOG = logging.getLogger(__name__)
_Record = TypeVar("_Record", bound=Mapping[str, Any])


class _Result(TypedDict):
    step: int
    metrics: dict[str, Any]


class Evaluation(_Result, total=False):
    """An evaluation in a ledger. A record may lack all but the first two keys.

    Attributes:
      step: The global step of the weights.
      metrics: The metrics, possibly nested.
      checkpoint: The checkpoint of the weights, relative to the model_dir.
      dataset: The name of the evaluated data.
      seconds: The duration of the evaluation.
      config_hash: The hash of the config of the evaluation.
      lineage: The number of rewinds of the run before the evaluation.
    """

    checkpoint: str | None
    dataset: str | None
    seconds: float
    config_hash: str | None
    lineage: int


class Ledger:
    """Appends evaluations to the file at `path` and reads them.

    A file has one writer. The ledger is local and runs on the host.

    Args:
      path: The file. It and its folder are created with the first record.
      dataset: The name of the evaluated data.
      config_hash: The hash of the config of the evaluations.
      lineage: The lineage of new records, or the file's newest lineage if that is larger.
      sets: The config_hash of each of several validation sets. They are evaluated together, and
        each has its own records, with metrics grouped by the set's name. Empty for a single set,
        called `dataset`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dataset: str,
        config_hash: str,
        lineage: int = 0,
        sets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.path = os.fspath(path)
        self.sets = dict(sets)
        self._hashes = self.sets or {dataset: config_hash}
        self._cached_records: tuple[Any, list[dict[str, Any]]] = (None, [])
        self._followed_signature: Any = None
        recorded_lineages = [record["lineage"] for record in self.records()]
        self.lineage = max([lineage, *recorded_lineages])
        self._recorded_metrics: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self._has_warned = False
        self._size = 0

    def append(
        self,
        step: int,
        metrics: Mapping[str, object],
        seconds: float | Mapping[str, float],
        checkpoint: str | None = None,
    ) -> bool:
        """Appends an evaluation unless it is already recorded.

        It is if the ledger has one of this step, dataset and config since the last rewind. The
        first record stays. If a repeated evaluation gives different metrics, the resume was not
        exact, and a warning reports the first such case.

        Args:
          step: The global step of the weights.
          metrics: The metrics, possibly nested. Values that are not single numbers are left out.
          seconds: The duration of the evaluation. For several validation sets, the durations by the
            names of the evaluated sets.
          checkpoint: The checkpoint of the weights, relative to the model_dir, or None if they were
            not saved.

        Returns:
          Whether a record was written.

        Raises:
          StorageError: when the file cannot be written.
        """
        evaluations = []
        if isinstance(seconds, Mapping):
            for name, duration in seconds.items():
                set_metrics = {name: metrics[name]}
                evaluations.append((name, set_metrics, duration))
        else:
            (dataset,) = self._hashes
            evaluations.append((dataset, dict(metrics), seconds))

        if self._recorded_metrics is None:
            # The first record of several with one key counts.
            recorded_metrics: dict[tuple[Any, ...], dict[str, Any]] = {}
            for record in self.records():
                if record.get("kind") != REWIND:
                    key = (
                        record["lineage"],
                        record["step"],
                        record.get("dataset"),
                        record.get("config_hash"),
                    )
                    values = _encode_metrics(record["metrics"])
                    recorded_metrics.setdefault(key, values)
            self._recorded_metrics = recorded_metrics

        is_new = False
        for dataset, set_metrics, duration in evaluations:
            scalars = extract_scalars(set_metrics)
            values = _encode_metrics(remove_best_values(scalars))
            config_hash = self._hashes[dataset]
            key = (self.lineage, int(step), dataset, config_hash)
            if key in self._recorded_metrics:
                recorded_values = self._recorded_metrics[key]
                self._warn_of_other_metrics(int(step), recorded_values, values)
                continue

            is_new = True
            self._warn_of_loss()
            self._write(
                {
                    "step": int(step),
                    "checkpoint": checkpoint,
                    "dataset": dataset,
                    "metrics": values,
                    "seconds": round(duration, 3),
                    "config_hash": config_hash,
                    "lineage": self.lineage,
                }
            )
            self._recorded_metrics[key] = values
            # There is no file if the folder was moved right after the line was written.
            signature = _signature(self.path)
            self._size = signature[1] if signature else 0
        return is_new

    def _warn_of_loss(self) -> None:
        """Warns when somebody has truncated or removed the file since its last record.

        Only records that this process appended count.
        """
        if not self._size:
            return
        signature = _signature(self.path)
        size = signature[1] if signature else 0
        if size >= self._size:
            return

        recorded_steps = {key[1] for key in self._recorded_metrics or ()}
        remaining_steps = {record["step"] for record in self.records()}
        lost_steps = recorded_steps - remaining_steps
        _LOG.warning(
            "%s was cut or removed during the run: the evaluations of %d steps are lost",
            self.path,
            len(lost_steps),
        )

    def rewind(self, step: int) -> None:
        """Records that the run continues from `step` in a new lineage.

        Evaluations of later steps no longer count.

        Raises:
          StorageError: when the file cannot be written.
        """
        lineage = self.lineage + 1
        self._write({"kind": REWIND, "lineage": lineage, "step": int(step)})
        self.lineage = lineage

    def follow(
        self, path: str | os.PathLike[str], before_rewind: Callable[[int], None] = lambda _: None
    ) -> int | None:
        """Copies new rewinds from the run's ledger at `path` to this one.

        Args:
          path: The ledger to follow.
          before_rewind: Called with the returned step before a rewind is written. If the process
            dies in this call, it finds the rewind again after a restart.

        Returns:
          The earliest step that the run went back to, or None if there is no new rewind.

        Raises:
          StorageError: when the file cannot be written.
        """
        signature = _signature(path)
        if signature == self._followed_signature:
            return None

        rewinds = [
            record
            for record in read_records(path)
            if record.get("kind") == REWIND and record["lineage"] > self.lineage
        ]
        step = min((rewind["step"] for rewind in rewinds), default=None)
        if step is not None:
            before_rewind(step)
        for rewind in rewinds:
            lineage = rewind["lineage"]
            self._write({"kind": REWIND, "lineage": lineage, "step": rewind["step"]})
            self.lineage = lineage

        self._followed_signature = signature
        return step

    def records(self) -> list[dict[str, Any]]:
        """Returns `read_records` of the file.

        The file is read again only when another object has changed it.
        """
        signature = _signature(self.path)
        cached_signature, records = self._cached_records
        if signature is None or signature != cached_signature:
            records = read_records(self.path)
            self._cached_records = (signature, records)
        return list(records)

    def _write(self, record: dict[str, Any]) -> None:
        """Appends a line without reading the earlier ones again, since a long run has many."""
        earlier_records = self.records()
        folder = os.path.dirname(self.path)
        # `append_json_line` would create the folder again.
        if self._recorded_metrics and not os.path.isdir(folder):
            raise StorageError(f"{self.path} cannot be written: {folder} was moved or removed")
        files.append_json_line(self.path, record, point="ledger")
        signature = _signature(self.path)
        records = [*earlier_records, _decode_record(record)]
        self._cached_records = (signature, records)

    def read_extent(self, step: int) -> tuple[int, int]:
        """Returns how far the evaluations that count reach before `step`.

        Returns:
          The number of these evaluations and their last step, or (0, -1) if there is none.
        """
        earlier_steps = []
        for record in _iterate_active_records(self.records()):
            if record["step"] < step:
                earlier_steps.append(record["step"])
        last_step = max(earlier_steps, default=-1)
        return len(earlier_steps), last_step

    def find_rewind_step(self, lineage: int) -> int | None:
        """Returns the earliest step that the run has gone back to since a lineage.

        Returns None if it has not gone back.
        """
        steps = (
            record["step"]
            for record in self.records()
            if record.get("kind") == REWIND and record["lineage"] > lineage
        )
        return min(steps, default=None)

    def get_current_evaluations(self) -> list[Evaluation]:
        """Returns the evaluations that count, on this data and with this config, in their order.

        A record without a `config_hash` counts too.
        """
        hashes: dict[Any, str] = dict(self._hashes)
        evaluations = []
        for record in self.get_active_evaluations():
            config_hash = record.get("config_hash")
            expected_hash = hashes.get(record.get("dataset"), config_hash)
            if config_hash in (None, expected_hash):
                evaluations.append(record)
        return evaluations

    def get_metrics_by_step(self) -> dict[int, dict[str, Any]]:
        """Returns the metrics by step.

        Only steps count at which all validation sets were evaluated with this config.
        """
        metrics_by_step: dict[int, dict[str, Any]] = {}
        sets_by_step: dict[int, set[str]] = {}
        first_set = next(iter(self._hashes))
        for record in self.get_current_evaluations():
            step = record["step"]
            metrics = metrics_by_step.setdefault(step, {})
            metrics.update(record["metrics"])
            sets = sets_by_step.setdefault(step, set())
            sets.add(record.get("dataset") or first_set)

        return {
            step: metrics
            for step, metrics in metrics_by_step.items()
            if sets_by_step[step] >= self._hashes.keys()
        }

    def find_recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` counts.

        A single set without a name is "".
        """
        datasets = {
            record.get("dataset")
            for record in self.get_active_evaluations()
            if record["step"] == step
        }
        if not self.sets:
            return {""} if datasets else set()
        return {name for name in self.sets if name in datasets}

    def get_active_evaluations(self) -> list[Evaluation]:
        """Returns the evaluations that count, on this data and with any config, in their order."""
        datasets = (None, *self._hashes)
        all_records = active_records(self.records())
        records = [record for record in all_records if record.get("dataset") in datasets]
        # `read_records` has checked the keys.
        return cast("list[Evaluation]", records)

    def _warn_of_other_metrics(
        self, step: int, before: Mapping[str, object], now: Mapping[str, object]
    ) -> None:
        # Values are compared as text, since NaN has to equal NaN.
        old_values = {name: str(value) for name, value in _flatten_metrics(before)}
        new_values = {name: str(value) for name, value in _flatten_metrics(now)}
        names = {**old_values, **new_values}
        changed_names = []
        for name in names:
            if old_values.get(name) != new_values.get(name):
                changed_names.append(name)
        if self._has_warned or not changed_names:
            return

        self._has_warned = True
        name = changed_names[0]
        _LOG.warning(
            "%s: step %d was evaluated again and gave other metrics (%s: %s, now %s): "
            "the data is other data under the same config, "
            "or the resume or the evaluation was not exact; the ledger keeps the first record",
            self.path,
            step,
            name,
            old_values.get(name, "none"),
            new_values.get(name, "none"),
        )


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the evaluations and rewinds in the file at `path`, in its order.

    Lines that a crash cut are left out. Unknown keys are kept. A record without a lineage has
    lineage 0. The result is empty if there is no file.
    """
    lines = files.read_json_lines(path)
    return [_decode_record(line) for line in lines if _is_record(line)]


def read_sidecar_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of sidecars, which are those of all other ledgers beside `path`."""
    own_path = os.path.abspath(path)
    folder = glob.escape(os.path.dirname(own_path))
    ledger_paths = glob.glob(f"{folder}/*.jsonl")

    records = []
    for ledger_path in sorted(ledger_paths):
        if ledger_path != own_path:
            records += read_records(ledger_path)
    return records


def active_records(records: Iterable[_Record]) -> list[_Record]:
    """Returns the evaluations that no rewind has superseded, in their order.

    Args:
      records: The evaluations and rewinds that `read_records` returns.
    """
    active = _iterate_active_records(list(records))
    return [copy.copy(record) for record in active]


def _iterate_active_records(records: Sequence[_Record]) -> Iterator[_Record]:
    rewinds = [
        (record["lineage"], record["step"]) for record in records if record.get("kind") == REWIND
    ]
    for record in records:
        if record.get("kind") == REWIND:
            continue
        is_superseded = any(
            lineage > record["lineage"] and start < record["step"] for lineage, start in rewinds
        )
        if not is_superseded:
            yield record


def merge_validation_sets(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Merges the records of several validation sets at one step.

    A set that appears again at a step, because its config was changed, starts another evaluation.

    Returns:
      The evaluations in their order.
    """
    merged: list[Evaluation] = []
    newest: dict[int, dict[str, Any]] = {}
    for record in evaluations:
        step = record["step"]
        metrics = record["metrics"]
        # The metrics of one of several sets are grouped by its name.
        names = list(metrics)
        if names != [record.get("dataset")]:
            merged.append(record)
            continue

        step_metrics = newest.get(step)
        if step_metrics is not None and step_metrics.keys().isdisjoint(metrics):
            step_metrics.update(metrics)
        else:
            newest[step] = dict(metrics)
            merged.append({"step": step, "metrics": newest[step]})
    return merged


def extract_scalars(logs: Mapping[str, object]) -> dict[str, Any]:
    """Returns logs as nested dicts of floats, without values that are not single numbers."""
    scalars: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            scalars[str(name)] = extract_scalars(value)
        elif (scalar := as_scalar(value)) is not None:
            scalars[str(name)] = scalar
    return scalars


def remove_best_values(logs: Mapping[str, object]) -> dict[str, Any]:
    """Returns the logs of an evaluation without the best value so far.

    The best value, `best_<name>` beside `<name>`, is not a result of that evaluation.
    """
    results = {}
    for name, value in logs.items():
        metric = name.removeprefix("best_")
        if metric != name and metric in logs:
            continue
        if isinstance(value, Mapping):
            value = remove_best_values(value)
        results[name] = value
    return results


def _signature(path: str | os.PathLike[str]) -> Any:
    """Returns a value that changes with the file, or None while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_record(record: Mapping[str, object]) -> bool:
    for number in (record.get("step"), record.get("lineage", 0)):
        # A bool is an int for Python.
        if not isinstance(number, int) or isinstance(number, bool):
            return False
    for text in (record.get("dataset", ""), record.get("config_hash", "")):
        if not isinstance(text, (str, type(None))):
            return False

    if record.get("kind") == REWIND:
        return True
    if "kind" in record:
        return False
    return isinstance(record.get("metrics"), dict)


def _decode_record(record: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {**record, "lineage": record.get("lineage", 0)}
    if record.get("kind") == REWIND:
        return decoded
    # Earlier releases recorded the best value.
    metrics = _decode_metrics(record["metrics"])
    metrics = remove_best_values(metrics)
    return {**decoded, "metrics": metrics}


def _decode_metrics(metrics: Mapping[str, object]) -> dict[str, Any]:
    return {
        name: _decode_metrics(value) if isinstance(value, Mapping) else from_json_number(value)
        for name, value in metrics.items()
    }


def _flatten_metrics(metrics: Mapping[str, object]) -> list[tuple[str, float]]:
    decoded = _decode_metrics(metrics)
    scalars = flatten_scalars(decoded, "|")
    return list(scalars.items())


def _encode_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _encode_metrics(value) if isinstance(value, Mapping) else to_json_number(value)
        for name, value in metrics.items()
    }
