"""The evaluation ledger: an append-only file with one line per evaluation, and pure functions over its records.

A record is {"step", "checkpoint", "dataset", "metrics", "seconds", "config_hash", "lineage"}.
`lineage` counts the rewinds of the run (rollback, a start from an earlier step). A rewind is a
separate line, {"kind": "rewind", "lineage", "step"}, and supersedes the records of earlier lineages
for later steps. A restart after a kill is not a rewind: its evaluations repeat recorded numbers and
are not written again. Lines are strict JSON: a metric that is NaN or infinite is written as the
text "nan", "inf" or "-inf" and read back as a float.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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


class Ledger:
    """Appends evaluations to the file at `path` and reads them; one writer per file. Local; runs on the host.

    Args:
      path: The file; it and its folder are created with the first record.
      dataset: The name of the evaluated data.
      config_hash: The hash of the config of the evaluations.
      lineage: The lineage of new records; the file's newest lineage if that is larger.
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
        self.lineage = max([lineage, *(record["lineage"] for record in self.records())])
        self._recorded_metrics: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self._has_warned, self._size = False, 0

    def append(
        self,
        step: int,
        metrics: Mapping[str, Any],
        seconds: float | Mapping[str, float],
        checkpoint: str | None = None,
    ) -> bool:
        """Appends an evaluation unless the ledger has one of this step, dataset and config since the last rewind.

        The first record stays. If a repeated evaluation gives different metrics, the resume was not
        exact; a warning reports the first such case.

        Args:
          step: The global step of the weights.
          metrics: The metrics, possibly nested; values that are not single numbers are left out.
          seconds: The duration of the evaluation; for several validation sets, by the names of the
            evaluated ones.
          checkpoint: The checkpoint of the weights, relative to the model_dir; None if they were
            not saved.

        Returns:
          Whether a record was written.

        Raises:
          StorageError: when the file cannot be written.
        """
        if isinstance(seconds, Mapping):
            evaluations = [(name, {name: metrics[name]}, spent) for name, spent in seconds.items()]
        else:
            (dataset,) = self._hashes
            evaluations = [(dataset, dict(metrics), seconds)]

        if self._recorded_metrics is None:
            self._recorded_metrics = _first_metrics(self.records())
        is_new = False
        for dataset, own, spent in evaluations:
            values = _encode_metrics(remove_best_values(extract_scalars(own)))
            key = (self.lineage, int(step), dataset, self._hashes[dataset])
            if key in self._recorded_metrics:
                self._warn_of_other_metrics(int(step), self._recorded_metrics[key], values)
                continue
            is_new = True
            self._warn_of_loss()
            self._write(
                {
                    "step": int(step),
                    "checkpoint": checkpoint,
                    "dataset": dataset,
                    "metrics": values,
                    "seconds": round(spent, 3),
                    "config_hash": self._hashes[dataset],
                    "lineage": self.lineage,
                }
            )
            self._recorded_metrics[key] = values
            self._size = os.path.getsize(self.path)
        return is_new

    def _warn_of_loss(self) -> None:
        """Warns when somebody has truncated or removed the file since this process appended its last record."""
        if self._size and (_signature(self.path) or (0, 0))[1] < self._size:
            steps = sorted(
                {key[1] for key in self._recorded_metrics or ()}
                - {item["step"] for item in self.records()}
            )
            _LOG.warning(
                "%s was cut or removed during the run: the evaluations of %d steps are lost (%s)",
                *(self.path, len(steps), _format_steps(steps)),
            )

    def rewind(self, step: int) -> None:
        """Records that the run continues from `step` in a new lineage; evaluations of later steps no longer count.

        Raises:
          StorageError: when the file cannot be written.
        """
        self._write({"kind": REWIND, "lineage": self.lineage + 1, "step": int(step)})
        self.lineage += 1

    def follow(
        self, path: str | os.PathLike[str], before_rewind: Callable[[int], None] = lambda _: None
    ) -> int | None:
        """Copies new rewinds from the run's ledger at `path` to this one.

        Args:
          path: The ledger to follow.
          before_rewind: Called with the returned step before a rewind is written: if the process
            dies in this call, it finds the rewind again after a restart.

        Returns:
          The earliest step that the run went back to; None if there is no new rewind.

        Raises:
          StorageError: when the file cannot be written.
        """
        signature = _signature(path)
        if signature == self._followed_signature:
            return None
        new = [
            item
            for item in read_records(path)
            if item.get("kind") == REWIND and item["lineage"] > self.lineage
        ]
        step = min((item["step"] for item in new), default=None)
        if step is not None:
            before_rewind(step)
        for item in new:
            self._write({name: item[name] for name in ("kind", "lineage", "step")})
            self.lineage = item["lineage"]
        self._followed_signature = signature
        return step

    def records(self) -> list[dict[str, Any]]:
        """Returns `read_records` of the file; reads it again only when another object has changed it."""
        signature = _signature(self.path)
        if signature is None or signature != self._cached_records[0]:
            self._cached_records = signature, read_records(self.path)
        return list(self._cached_records[1])

    def _write(self, record: dict[str, Any]) -> None:
        """Appends a line without reading the earlier ones again, since a long run has many."""
        before = self.records()
        folder = os.path.dirname(self.path)
        if self._recorded_metrics and not os.path.isdir(folder):  # append_line would make it again
            raise StorageError(f"{self.path} cannot be written: {folder} was moved or removed")
        files.append_json_line(self.path, record, point="ledger")
        self._cached_records = _signature(self.path), [*before, _decode_record(record)]

    def read_extent(self, step: int) -> tuple[int, int]:
        """Returns (number of evaluations before `step` that count, their last step); (0, -1) if there is none."""
        evaluated = [
            item["step"] for item in _iterate_active_records(self.records()) if item["step"] < step
        ]
        return len(evaluated), max(evaluated, default=-1)

    def find_rewind_step(self, lineage: int) -> int | None:
        """Returns the earliest step that the run has gone back to since a lineage; None if it has not."""
        rewinds = (
            item
            for item in self.records()
            if item.get("kind") == REWIND and item["lineage"] > lineage
        )
        return min((item["step"] for item in rewinds), default=None)

    def get_current_evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations that count, on this data and with this config, in their order."""
        hashes: dict[Any, str] = dict(self._hashes)
        return [
            item
            for item in self.get_active_evaluations()
            if item.get("config_hash")
            in (None, hashes.get(item.get("dataset"), item.get("config_hash")))
        ]

    def get_metrics_by_step(self) -> dict[int, dict[str, Any]]:
        """Returns the metrics by step, for the steps at which all validation sets were evaluated with this config."""
        found: dict[int, dict[str, Any]] = {}
        of_step: dict[int, set[str]] = {}
        for item in self.get_current_evaluations():
            found.setdefault(item["step"], {}).update(item["metrics"])
            of_step.setdefault(item["step"], set()).add(
                item.get("dataset") or next(iter(self._hashes))
            )
        return {
            step: metrics for step, metrics in found.items() if of_step[step] >= self._hashes.keys()
        }

    def find_recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` counts; a single set without a name is ""."""
        found = {
            item.get("dataset") for item in self.get_active_evaluations() if item["step"] == step
        }
        return (
            {name for name in self.sets if name in found}
            if self.sets
            else ({""} if found else set())
        )

    def get_active_evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations that count, on this data and with any config, in their order."""
        return [
            item
            for item in active_records(self.records())
            if item.get("dataset") in (None, *self._hashes)
        ]

    def _warn_of_other_metrics(
        self, step: int, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        # Compared as text, since NaN has to equal NaN.
        old, new = (
            {name: str(value) for name, value in _flatten_metrics(side)} for side in (before, now)
        )
        both = {**old, **new}
        others = [name for name in both if old.get(name) != new.get(name)]
        if self._has_warned or not others:
            return
        self._has_warned, name = True, others[0]
        _LOG.warning(
            "%s: step %d was evaluated again and gave other metrics (%s: %s, now %s): the data is"
            " other data under the same config, or the resume or the evaluation was not exact; the"
            " ledger keeps the first record",
            *(self.path, step, name, old.get(name, "none"), new.get(name, "none")),
        )


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the evaluations and rewinds in the file at `path`, in its order, without lines that a crash cut.

    Unknown keys are kept. A record without a lineage has lineage 0. The result is empty if there is
    no file.
    """
    return [_decode_record(record) for record in files.read_json_lines(path) if _is_record(record)]


def read_sidecar_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of all other ledgers in the folder of the one at `path`: those of sidecars."""
    folder, name = os.path.split(os.path.abspath(path))
    others = sorted(set(glob.glob(f"{glob.escape(folder)}/*.jsonl")) - {os.path.join(folder, name)})
    return [record for other in others for record in read_records(other)]


def active_records(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the evaluations that count, in their order: those that no rewind has superseded.

    Args:
      records: The evaluations and rewinds that `read_records` returns.
    """
    return [dict(item) for item in _iterate_active_records(list(records))]


def _iterate_active_records(records: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    began = [(item["lineage"], item["step"]) for item in records if item.get("kind") == REWIND]
    for item in records:
        superseded = began and any(
            lineage > item["lineage"] and start < item["step"] for lineage, start in began
        )
        if item.get("kind") != REWIND and not superseded:
            yield item


def merge_validation_sets(evaluations: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the evaluations in their order, with the records of several validation sets at one step merged.

    A set that appears again at a step, because its config was changed, starts another evaluation.
    """
    found: list[Mapping[str, Any]] = []
    newest: dict[int, dict[str, Any]] = {}
    for one in evaluations:
        step, metrics = one["step"], one["metrics"]
        if list(metrics) != [one.get("dataset")]:
            found.append(one)
        elif step in newest and not metrics.keys() & newest[step].keys():
            newest[step].update(metrics)
        else:
            newest[step] = dict(metrics)
            found.append({"step": step, "metrics": newest[step]})
    return found


def extract_scalars(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as nested dicts of floats, without values that are not single numbers."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        kept = extract_scalars(value) if isinstance(value, Mapping) else as_scalar(value)
        if kept is not None:
            found[str(name)] = kept
    return found


def remove_best_values(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of an evaluation without the best value so far, which is not a result of that evaluation."""
    own = {
        name: value
        for name, value in logs.items()
        if name.removeprefix("best_") not in logs.keys() - {name}
    }
    return {
        name: remove_best_values(value) if isinstance(value, Mapping) else value
        for name, value in own.items()
    }


def _format_steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 5 else f"{steps[0]} to {steps[-1]}"


def _signature(path: str | os.PathLike[str]) -> Any:
    """Returns a value that changes with the file; None while there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _first_metrics(records: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in records:
        if item.get("kind") != REWIND:
            key = (item["lineage"], item["step"], item.get("dataset"), item.get("config_hash"))
            known.setdefault(key, _encode_metrics(item["metrics"]))
    return known


def _is_record(record: Mapping[str, Any]) -> bool:
    numbers = (record.get("step"), record.get("lineage", 0))
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        return False
    if not all(
        isinstance(record.get(name, ""), (str, type(None))) for name in ("dataset", "config_hash")
    ):
        return False
    return record.get("kind") == REWIND or (
        "kind" not in record and isinstance(record.get("metrics"), dict)
    )


def _decode_record(record: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {**record, "lineage": record.get("lineage", 0)}
    if record.get("kind") == REWIND:
        return decoded
    return {
        **decoded,
        "metrics": remove_best_values(_decode_metrics(record["metrics"])),
    }  # earlier releases recorded the best


def _decode_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _decode_metrics(value) if isinstance(value, Mapping) else from_json_number(value)
        for name, value in metrics.items()
    }


def _flatten_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    return list(flatten_scalars(_decode_metrics(metrics), "|").items())


def _encode_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _encode_metrics(value) if isinstance(value, Mapping) else to_json_number(value)
        for name, value in metrics.items()
    }
