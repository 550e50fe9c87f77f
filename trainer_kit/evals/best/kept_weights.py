"""Compares the weights that a folder of best weights holds with those that the recorded evaluations say to keep.

Weights of steps that a killed run has yet to reach again are held like all others: once it reaches them, they are the
ones to keep. Imports TensorFlow only if needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.criterion import Criterion, Scored
from trainer_kit.evals.ledger import merged_sets
from trainer_kit.telemetry.scalars import flat_scalars

_LOG = logging.getLogger(__name__)


def info_of(step: int, metrics: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Returns the info of weights, for their record and for info.json; `metrics` may be nested."""
    flat = flat_scalars(metrics, "|")
    return {"checkpoint": f"ckpt-{step}", "step": step, "metric": metric, "value": flat[metric], "metrics": flat}


class KeptWeights:
    """The whole weights in a folder that have an evaluation or a record.

    Args:
      folder: The folder of the weights.
      criterion: The rule that decides what is kept.

    Attributes:
      held: The evaluations to keep whose weights the folder holds; the record of each is the result of `info_of`.
      candidates: The recorded evaluations in their order, followed by weights that only their own record describes.
    """

    def __init__(self, folder: BestFolder, criterion: Criterion) -> None:
        self.folder, self._criterion = folder, criterion
        self._noted = folder.infos(criterion.metric)  # all workers get the same result; one of them writes
        self.candidates = self._described_by_record_only(())
        self.held = criterion.fold(self.candidates)
        self._wanted: set[int] = set()
        self._gone: set[int] = set()
        self._missing: set[int] = set()
        self._rewound_to: int | None = None
        self._repair()

    def follow(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Selects the held weights by the recorded evaluations, as far as weights exist, and updates their records.

        Records of several validation sets at one step count as one evaluation. If they lack the metric, because the run
        was killed between two of them, the record of that step's weights is used.

        Raises:
          StorageError: when a file cannot be written.
        """
        limit, self._rewound_to = self._rewound_to, None
        counting = merged_sets(one for one in evaluations if limit is None or one["step"] <= limit)
        scored = (self._criterion.score(one["step"], one["metrics"], one) for one in counting)
        recorded = [one._replace(record=self._info(one)) for one in scored if one is not None]
        known = {one["step"] for one in counting if self._has_metric(one)}
        self.candidates = recorded + self._described_by_record_only(known)
        self._wanted, self._gone = {one.step for one in self._criterion.fold(self.candidates)}, set()
        whole = self.folder.whole(self._noted)
        held = self._criterion.fold(one for one in self.candidates if one.step in whole)
        for one in held:
            if one.step not in self._noted or self._noted[one.step]["value"] != one.value:
                self.folder.note(one.record)
                self._noted[one.step] = one.record
        self.held = [one._replace(record=self._noted[one.step]) for one in held]
        if self._name_best():
            best = self.ranked[0].step
            _LOG.info("%s was written again: the best weights are those of step %d", self.folder.info_path, best)
        self.remove_others()

    @property
    def ranked(self) -> list[Scored]:
        """The held evaluations, the best first."""
        return self._criterion.ranked(self.held)

    def with_new(self, new: Scored, known: bool) -> list[Scored] | None:
        """Returns the evaluations to hold after a new one; None if the new one is not to be exported.

        Args:
          new: The new evaluation.
          known: Whether an evaluation of its step was already kept.
        """
        self._warn_of_missing()
        there = next((one for one in self.held if one.step == new.step), None)
        if there is not None and (known or there.value == new.value):
            return None
        held = self._criterion.add([one for one in self.held if one is not there], new)
        return held if new in held else None

    def lost(self, saved: Callable[[int], bool]) -> tuple[list[int], list[Scored]]:
        """Returns the steps of missing weights that checkpoints have, and the evaluations without any weights.

        Args:
          saved: Returns whether the checkpoint of a step exists and is whole.
        """
        known: dict[int, bool] = {}
        gone: list[Scored] = []
        while True:
            missing = [one for one in self._criterion.fold(self._not_gone()) if one.step not in self._noted]
            for one in missing:
                if one.step not in known:
                    known[one.step] = saved(one.step)
            if all(known[one.step] for one in missing):
                return [one.step for one in missing], gone
            gone += [one for one in missing if not known[one.step]]
            self._gone |= {one.step for one in gone}

    def told_of_gone(self, one: Scored) -> str:
        """Returns the warning about weights that `lost` found neither here nor in a checkpoint."""
        others = self._criterion.ranked(self._criterion.fold(self._not_gone()))
        kept = ", ".join(f"step {other.step} ({other.value})" for other in others)
        instead = f"the best weights that exist: {kept}" if kept else "the next evaluation is exported"
        why = f"{self._criterion.metric} {one.value}"
        return (
            f"{self.folder.path}: the weights of step {one.step} should be kept ({why}), but they are "
            f"missing or damaged, and so is the checkpoint of that step; {instead}"
        )

    def with_lost(self, step: int) -> tuple[Scored, list[Scored]]:
        """Returns the candidate of a step that `lost` returned, and the evaluations to hold together with it."""
        wanted = self._criterion.fold(self._not_gone())
        one = next(one for one in [*wanted, *self.candidates] if one.step == step)
        there = {*self._noted, step}
        self._wanted.add(step)
        return one, self._criterion.fold(other for other in self.candidates if other.step in there)

    def hold(self, held: list[Scored], new: Scored) -> None:
        """Adds the exported weights of `new` to the held ones, and names the best in info.json.

        Raises:
          StorageError: when info.json cannot be written.
        """
        before, self.held = self.held, held
        try:
            self._name_best()
        except BaseException:
            self.held = before
            raise
        self._noted[new.step] = new.record

    def only_held(self) -> None:
        """Removes all weights except the held ones; to be called after an export."""
        self._wanted = set()
        self.remove_others()

    def remove_others(self) -> None:
        """Removes weights that are neither held nor to be kept; does nothing while nothing is held."""
        if self.held:
            steps = {one.step for one in self.held} | self._wanted
            self.folder.remove_others(steps)
            self._noted = {step: info for step, info in self._noted.items() if step in steps}

    def forget_after(self, step: int) -> list[int]:
        """Forgets weights of later steps, in info.json too; returns the steps of the weights to move away.

        Raises:
          StorageError: when info.json cannot be written.
        """
        self._rewound_to = step
        self._noted = {of: info for of, info in self._noted.items() if of <= step}
        self.candidates = [one for one in self.candidates if one.step <= step]
        self.held = [one for one in self.held if one.step <= step]
        later = [of for of in self.folder.steps() if of > step]
        if self.held:
            self._name_best()
        elif later:
            self.folder.name_none()
        return later

    def _name_best(self) -> bool:
        """Makes info.json name the best held weights; returns whether it has changed."""
        there = set(self.folder.steps())  # somebody may have removed weights during the run
        best = next((one for one in self.ranked if one.step in there), None)
        return best is not None and self.folder.name(best.record)

    def _warn_of_missing(self) -> None:
        """Warns once of weights that somebody has moved or removed since they were exported."""
        missing = {one.step for one in self.held} - set(self.folder.steps()) if self.folder.writes else set()
        if missing - self._missing:
            _LOG.warning(
                "%s has lost the weights of step %s: they were moved or removed during the run. The next start exports "
                "them again if the checkpoint of that step still exists",
                *(self.folder.path, ", ".join(map(str, sorted(missing)))),
            )
        self._missing |= missing

    def _repair(self) -> None:
        """Writes info.json again from the records of the weights, if it is missing or wrong; then the pointer file."""
        wrong = self.folder.wrong_with_info(self._noted)
        path, told = self.folder.info_path, self.folder.told()
        if not wrong and told is not None:
            self.folder.name(told)  # a process may have died between info.json and the pointer file
        if self.held:
            if wrong and self._name_best():
                best = self.ranked[0].step
                _LOG.warning("%s was missing or damaged; it was written again and names step %d", path, best)
            self.folder.remove_others(self.folder.steps())
        elif wrong and self.folder.has_info():
            said = "is damaged, as are the weights' records" if wrong == "is damaged" else wrong
            _LOG.warning(
                "%s %s; the best is chosen from the evaluations in the ledger, if it has any, and from later ones",
                path,
                said,
            )

    def _not_gone(self) -> list[Scored]:
        return [one for one in self.candidates if one.step not in self._gone]

    def _has_metric(self, evaluation: Mapping[str, Any]) -> bool:
        """Whether a recorded evaluation has the metric, finite or not."""
        return self._criterion.metric in flat_scalars(evaluation["metrics"], "|")

    def _described_by_record_only(self, steps: Iterable[int]) -> list[Scored]:
        known = set(steps)
        infos = [info for step, info in sorted(self._noted.items()) if step not in known]
        return [Scored(info["step"], info["value"], info) for info in infos]

    def _info(self, one: Scored) -> dict[str, Any]:
        """Returns the info of a recorded evaluation, without the best so far, which is added after the export."""
        flat = flat_scalars(one.record["metrics"], "|")
        own = {name: value for name, value in flat.items() if name.removeprefix("best_") not in flat.keys() - {name}}
        return info_of(one.step, own if self._criterion.metric in own else flat, self._criterion.metric)
