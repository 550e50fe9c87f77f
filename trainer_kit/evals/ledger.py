"""The evaluation ledger: one line per evaluation, append-only, and what follows from it as pure functions.

A record is {"step", "checkpoint", "dataset", "metrics", "seconds", "config_hash", "lineage"}. `lineage` counts how
often the run was rewound (rollback, a start from an earlier step); a rewind is a line of its own, {"kind": "rewind",
"lineage", "step"}, and takes away the records of earlier lineages for later steps. A restart after a kill is no rewind:
its evaluations give the numbers that are there already, and are not written again. Lines are strict JSON: a metric that
is NaN or infinite is the text "nan", "inf" or "-inf" and read back as a float.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from trainer_kit import files
from trainer_kit.telemetry.scalars import as_scalar, flat_scalars, from_json_number, to_json_number

REWIND = "rewind"
_LOG = logging.getLogger(__name__)


class Ledger:
    """Appends evaluations to the file at `path` and reads them; one writer per file. Local; runs on the host.

    Args:
      path: the file; it and its folder are made with the first record.
      dataset: what the evaluations of this object are of.
      config_hash: of the config that they are made with.
      lineage: of the records to come; the file's newest lineage if that is larger.
      sets: the config_hash of each of several validation sets, which are evaluated together and have records of their
        own, with metrics grouped by the set's name; none: there is one, called `dataset`.
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
        self._read: tuple[Any, list[dict[str, Any]]] = (None, [])
        self._followed: Any = None
        self.lineage = max([lineage, *(record["lineage"] for record in self.records())])
        self._known: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self._told, self._size = False, 0

    def append(
        self,
        step: int,
        metrics: Mapping[str, Any],
        seconds: float | Mapping[str, float],
        checkpoint: str | None = None,
    ) -> bool:
        """Appends an evaluation unless the ledger has one of this lineage, step, dataset and config.

        The first record stays. When the metrics that come again are others, the resume was not exact, and the first
        such case is told in a warning.

        Args:
          step: global step of the weights.
          metrics: may be nested; what is no single number is left out.
          seconds: how long the evaluation took; of several validation sets, by name, those that were evaluated.
          checkpoint: the one that holds the weights, relative to the model_dir; None if they were not saved.

        Returns:
          Whether a record was written.

        Raises:
          StorageError: when the file cannot be written.
        """
        if isinstance(seconds, Mapping):
            written = [self._append(name, step, {name: metrics[name]}, seconds[name], checkpoint) for name in seconds]
            return any(written)
        (dataset,) = self._hashes
        return self._append(dataset, step, metrics, seconds, checkpoint)

    def _append(
        self, dataset: str, step: int, metrics: Mapping[str, Any], seconds: float, checkpoint: str | None
    ) -> bool:
        values = _encoded(plain(metrics))
        key = (self.lineage, int(step), dataset, self._hashes[dataset])
        if self._known is None:
            self._known = _first_metrics(self.records())
        if key in self._known:
            self._compare(int(step), self._known[key], values)
            return False
        record = {
            "step": int(step),
            "checkpoint": checkpoint,
            "dataset": dataset,
            "metrics": values,
            "seconds": round(seconds, 3),
            "config_hash": self._hashes[dataset],
            "lineage": self.lineage,
        }
        self._warn_of_loss()
        self._write(record)
        self._known[key], self._size = values, os.path.getsize(self.path)
        return True

    def _warn_of_loss(self) -> None:
        """Says so when somebody has cut or removed the file since this process has appended its last record."""
        if self._size and (_signature(self.path) or (0, 0))[1] < self._size:
            steps = sorted({key[1] for key in self._known or ()} - {item["step"] for item in self.records()})
            _LOG.warning(
                "%s was cut or removed during the run: the evaluations of %d steps are lost (%s)",
                *(self.path, len(steps), _listed(steps)),
            )

    def rewind(self, step: int) -> None:
        """Notes that the run goes on from `step` in a new lineage; what was evaluated for later steps counts no more.

        Raises:
          StorageError: when the file cannot be written.
        """
        self._write({"kind": REWIND, "lineage": self.lineage + 1, "step": int(step)})
        self.lineage += 1

    def follow(self, path: str | os.PathLike[str], before: Callable[[int], None] = lambda _: None) -> int | None:
        """Notes the rewinds in the ledger at `path`, that of the run itself, which are not noted here yet.

        Args:
          path: of the ledger that is followed.
          before: called with the step that is returned, before a rewind is noted: a process that dies in it finds the
            rewind new when it is started again.

        Returns:
          The earliest step of them, to which the run went back; None if there is no new one.

        Raises:
          StorageError: when the file cannot be written.
        """
        signature = _signature(path)
        if signature == self._followed:
            return None
        new = [item for item in read_records(path) if item.get("kind") == REWIND and item["lineage"] > self.lineage]
        step = min((item["step"] for item in new), default=None)
        if step is not None:
            before(step)
        for item in new:
            self._write({name: item[name] for name in ("kind", "lineage", "step")})
            self.lineage = item["lineage"]
        self._followed = signature
        return step

    def records(self) -> list[dict[str, Any]]:
        """Returns `read_records` of the file, which is read again only when another object has changed it."""
        signature = _signature(self.path)
        if signature is None or signature != self._read[0]:
            self._read = signature, read_records(self.path)
        return list(self._read[1])

    def _write(self, record: dict[str, Any]) -> None:
        """Appends a line; what was read before is not read again, for a long run has many."""
        before = self.records()
        files.append_line(self.path, record, point="ledger")
        self._read = _signature(self.path), [*before, _decoded(record)]

    def extent(self, step: int) -> tuple[int, int]:
        """Returns (how many evaluations before `step` count, the last step of them); (0, -1) if there is none."""
        evaluated = [item["step"] for item in _active(self.records()) if item["step"] < step]
        return len(evaluated), max(evaluated, default=-1)

    def went_back_to(self, lineage: int) -> int | None:
        """Returns the earliest step that the run has gone back to after a lineage; None if it has not."""
        rewinds = (item for item in self.records() if item.get("kind") == REWIND and item["lineage"] > lineage)
        return min((item["step"] for item in rewinds), default=None)

    def active(self) -> list[dict[str, Any]]:
        """Returns the evaluations on this data and of this config that count, in their order."""
        hashes: dict[Any, str] = dict(self._hashes)
        return [
            item
            for item in self.counting()
            if item.get("config_hash") in (None, hashes.get(item.get("dataset"), item.get("config_hash")))
        ]

    def evaluated(self) -> dict[int, dict[str, Any]]:
        """Returns the metrics of each step at which all of the data was evaluated with this config."""
        found: dict[int, dict[str, Any]] = {}
        of_step: dict[int, set[str]] = {}
        for item in self.active():
            found.setdefault(item["step"], {}).update(item["metrics"])
            of_step.setdefault(item["step"], set()).add(item.get("dataset") or next(iter(self._hashes)))
        return {step: metrics for step, metrics in found.items() if of_step[step] >= self._hashes.keys()}

    def recorded_sets(self, step: int) -> set[str]:
        """Returns the validation sets whose evaluation of `step` counts; the only one, if it has no name, is ""."""
        found = {item.get("dataset") for item in self.counting() if item["step"] == step}
        return {name for name in self.sets if name in found} if self.sets else ({""} if found else set())

    def counting(self) -> list[dict[str, Any]]:
        """Returns the evaluations on this data that count, of whatever config, in their order."""
        return [item for item in active_records(self.records()) if item.get("dataset") in (None, *self._hashes)]

    def _compare(self, step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        # As text, since NaN is no other metric than NaN.
        old, new = ({name: str(value) for name, value in _flat(side)} for side in (before, now))
        both = {**old, **new}
        others = [name for name in both if old.get(name) != new.get(name) and not _is_best_so_far(name, both)]
        if self._told or not others:
            return
        self._told, name = True, others[0]
        _LOG.warning(
            "%s: step %d was evaluated again and gave other metrics (%s: %s, now %s): the resume, or the evaluation, "
            "was not exact there; the first record stays",
            *(self.path, step, name, old.get(name, "none"), new.get(name, "none")),
        )


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the evaluations and rewinds in the file at `path`, in its order; lines that a crash cut are left out.

    Keys that are not ours are kept. A record without a lineage is of lineage 0. There is none where there is no file.
    """
    return [_decoded(record) for record in files.read_lines(path) if _is_record(record)]


def other_ledgers(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of all ledgers in the folder of the one at `path` but its own: those of sidecars."""
    folder, name = os.path.split(os.path.abspath(path))
    others = sorted(set(glob.glob(f"{glob.escape(folder)}/*.jsonl")) - {os.path.join(folder, name)})
    return [record for other in others for record in read_records(other)]


def active_records(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the evaluations that count, in their order: those that no later lineage began before.

    Args:
      records: evaluations and rewinds, as `read_records` returns them.
    """
    return [dict(item) for item in _active(list(records))]


def _active(records: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    began = [(item["lineage"], item["step"]) for item in records if item.get("kind") == REWIND]
    for item in records:
        superseded = began and any(lineage > item["lineage"] and start < item["step"] for lineage, start in began)
        if item.get("kind") != REWIND and not superseded:
            yield item


def merged_sets(evaluations: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns evaluations in their order, the records that several validation sets have of one step as one.

    A set that comes once more at a step, since its config was changed, begins another.
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


def plain(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as nested dicts of floats; what is no single number is left out."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        kept = plain(value) if isinstance(value, Mapping) else as_scalar(value)
        if kept is not None:
            found[str(name)] = kept
    return found


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 5 else f"{steps[0]} to {steps[-1]}"


def _signature(path: str | os.PathLike[str]) -> Any:
    """Tells one state of the file from another; None while there is none."""
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
            known.setdefault(key, _encoded(item["metrics"]))
    return known


def _is_record(record: Mapping[str, Any]) -> bool:
    numbers = (record.get("step"), record.get("lineage", 0))
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        return False
    if not all(isinstance(record.get(name, ""), (str, type(None))) for name in ("dataset", "config_hash")):
        return False
    return record.get("kind") == REWIND or ("kind" not in record and isinstance(record.get("metrics"), dict))


def _decoded(record: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {**record, "lineage": record.get("lineage", 0)}
    return decoded if record.get("kind") == REWIND else {**decoded, "metrics": _numbers(record["metrics"])}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _numbers(value) if isinstance(value, Mapping) else from_json_number(value)
        for name, value in metrics.items()
    }


def _is_best_so_far(name: str, names: Container[str]) -> bool:
    """Whether a metric, `best_<metric>`, is that of the run so far, which other evaluations decide."""
    place, bar, last = name.rpartition("|")
    return last.startswith("best_") and f"{place}{bar}{last.removeprefix('best_')}" in names


def _flat(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    return list(flat_scalars(_numbers(metrics), "|").items())


def _encoded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _encoded(value) if isinstance(value, Mapping) else to_json_number(value)
        for name, value in metrics.items()
    }
