"""Exports the best checkpoints by one criterion: the weights first, the record second.

`ckpt-<step>.*` holds evaluated weights (averaged ones, if there is a moving average), and
`info.json` names the best of them with its metric. It is written after the weights, and weights
that are no longer kept are deleted after it: at every moment info.json names existing weights. The
commit record of weights holds the same information, so that a lost or damaged info.json can be
written again.

The recorded evaluations decide which weights are kept (criterion.py). Weights are exported before
their evaluation is recorded. A killed run resumes from its last checkpoint and evaluates some steps
again. It reports the best up to the step it has reached; weights that it exported later stay in
place until the run reaches their step again. A run that goes back by request moves later exports to
`archived/`. If weights are lost, the next evaluation that is better than the existing weights is
exported.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.commit import describe_damage
from trainer_kit.checkpoints.startup_scan import ARCHIVED, set_aside
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.criterion import Criterion, ScoredEvaluation
from trainer_kit.evals.best.info_json import build_info
from trainer_kit.evals.ledger import merge_validation_sets
from trainer_kit.telemetry.scalars import flatten_scalars

_LOG = logging.getLogger(__name__)


class BestWeightsExporter:
    """Exports the weights of each evaluation that is kept, across restarts.

    Args:
      export_dir: The folder of the weights and info.json.
      metric_name: The metric's name in the logs of an evaluation; `a|b` is the entry b of the
        nested logs a.
      metric_comp: "higher" or "lower": which value is better.
      keep: The number of weights to keep.
      min_delta: An evaluation must be better by more than this to displace the worst kept one.
      is_chief: Whether this worker writes the folder. False on workers that are not the chief: they
        take the same decisions and part in each save, since reading a variable can involve all
        workers, but discard what they save.
      option: The config field that names the metric, for messages.
      folder: The files of `export_dir`, if their form differs from that of BestFolder.

    Attributes:
      criterion: The rule that decides what is kept.
    """

    def __init__(
        self,
        export_dir: str,
        metric_name: str,
        metric_comp: str = "higher",
        *,
        keep: int = 1,
        min_delta: float = 0.0,
        is_chief: bool = True,
        option: str = "trainer.best_checkpoint_eval_metric",
        folder: BestFolder | None = None,
    ) -> None:
        self.export_dir = export_dir
        self.metric_name = metric_name
        self.metric_comp = metric_comp
        self.criterion = Criterion(metric_name, metric_comp, keep, min_delta)
        self._option = option
        self._folder = folder or BestFolder(export_dir, is_chief)
        # The evaluations whose weights are kept, in the order of steps. All workers have the same,
        # and decide by it about exports: the chief may be changing the folder meanwhile.
        infos = self._folder.read_infos(metric_name)
        self._exported_evaluations = self.criterion.fold(
            ScoredEvaluation(step, info["value"], info) for step, info in infos.items()
        )
        self._best_so_far = list(
            self._exported_evaluations
        )  # evaluations, which may have lost their weights
        self._reported_lost_steps: set[int] = set()  # the steps of weights that a warning has named
        self._folder.update_best(self._sort_steps(self._exported_evaluations))

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, flat, nested names joined by `|`; None before the first."""
        best = self.criterion.best(self._best_so_far)
        return best.record["metrics"] if best else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best so far."""
        best = self.criterion.best(self._best_so_far)
        return (self.metric_name, best.value, best.step) if best else None

    def resume(self, step: int | None, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Selects the weights to keep by the recorded evaluations, for a run which resumes from `step`.

        Records of several validation sets at one step count as one evaluation. If they lack the
        metric, because the run was killed between two of them, the record of that step's weights is
        used.

        Args:
          step: The step of the restored checkpoint; None for a sidecar, for which all evaluations
            count.
          evaluations: The recorded evaluations that count, with "step" and "metrics", in order,
            later ones included.

        Raises:
          StorageError: when a file cannot be written.
        """
        candidates: list[ScoredEvaluation] = []
        unrecorded = {item.step: item for item in self._exported_evaluations}
        for evaluation in merge_validation_sets(evaluations):
            metrics = flatten_scalars(evaluation["metrics"], "|")
            if self.metric_name in metrics:
                unrecorded.pop(evaluation["step"], None)
                info = build_info(evaluation["step"], metrics, self.metric_name)
                if math.isfinite(info["value"]):
                    candidates.append(ScoredEvaluation(info["step"], info["value"], info))
        candidates += unrecorded.values()
        self._best_so_far = self.criterion.fold(
            item for item in candidates if step is None or item.step <= step
        )

        before = {item.step: item for item in self._exported_evaluations}
        steps = self._folder.steps()
        whole = {
            number
            for number in steps
            if number in before or not describe_damage(self._folder.prefix(number))
        }
        wanted = {item.step for item in self.criterion.fold(candidates)}
        self._warn_of_lost(wanted.intersection(item.step for item in self._best_so_far) - whole)

        self._exported_evaluations = []
        for item in sorted(self.criterion.fold(item for item in candidates if item.step in whole)):
            earlier = before.get(item.step)
            if earlier is None or earlier.value != item.value:  # the ledger decides
                self._folder.write_info_record(item.record)
                earlier = item
            self._exported_evaluations.append(earlier)
        self._folder.rotate(self._sort_steps(self._exported_evaluations))

    def rewind(self, step: int, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Moves weights of steps after `step`, which are superseded, to `archived/`, and resumes from `step`.

        Args:
          step: The step that the run goes back to.
          evaluations: The recorded evaluations; see `resume`. Later ones no longer count.

        Raises:
          StorageError: when a file cannot be moved or written.
        """
        self._exported_evaluations = [
            item for item in self._exported_evaluations if item.step <= step
        ]
        later = [number for number in self._folder.steps() if number > step]
        if self._exported_evaluations:
            self._folder.update_best(self._sort_steps(self._exported_evaluations))
        elif later:
            self._folder.clear_best()
        for number in later if self._folder.is_writer else ():
            set_aside(self._folder.prefix(number), ARCHIVED)
        self.resume(step, [item for item in evaluations if item["step"] <= step])

    def check_metric(self, names: Iterable[str]) -> None:
        """Raises UsageError when no evaluation will report the metric as a single number.

        Args:
          names: The names of all metrics that an evaluation reports as single numbers, nested ones
            joined by `|`.
        """
        known = list(names)
        if self.metric_name not in known:
            advice, names = suggest_names(self.metric_name, known), ", ".join(sorted(known))
            raise UsageError(
                f"{self._option}: {self.metric_name!r} is not a validation metric, or not a single"
                f" number; {advice}" + (f" (all: {names})" if names not in advice else "")
            )

    def maybe_export_checkpoint(
        self, checkpoint: tf.train.Checkpoint, eval_logs: Mapping[str, Any], step: int
    ) -> bool:
        """Exports `checkpoint` if its evaluation is kept; a value that is not finite is never kept.

        Runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the evaluated weights.
          eval_logs: The evaluation's metrics, possibly nested; values that are not single numbers
            are left out.
          step: The global step of the weights.

        Returns:
          Whether it was exported.

        Raises:
          UsageError: when the metric is not among the logs, or is not a single number.
          StorageError: when the weights or the record cannot be written.
        """
        logs = flatten_scalars(eval_logs, "|")
        self.check_metric(logs)
        value = logs[self.metric_name]
        if not math.isfinite(value):
            _LOG.warning(
                "%s is %s at step %d: not a candidate for the best checkpoint",
                self.metric_name,
                value,
                step,
            )
            return False

        new = ScoredEvaluation(int(step), value, build_info(int(step), logs, self.metric_name))
        was_evaluated = any(
            item.step == new.step for item in self._best_so_far
        )  # the first evaluation of a step counts
        self._best_so_far = self.criterion.select_after(self._best_so_far, new)
        self._warn_of_lost(
            {item.step for item in self._exported_evaluations} - set(self._folder.steps())
        )

        earlier = next((item for item in self._exported_evaluations if item.step == new.step), None)
        if earlier is not None and (was_evaluated or earlier.value == new.value):
            return False  # perhaps it was exported before the run was killed
        kept = self.criterion.select_after(
            [item for item in self._exported_evaluations if item is not earlier], new
        )
        if new not in kept:
            return False

        save = functools.partial(self._save, checkpoint)
        self._folder.write(new.step, save, self._sort_steps(kept), point="best", info=new.record)
        self._exported_evaluations = sorted(kept)
        return True

    def _save(self, checkpoint: tf.train.Checkpoint, prefix: str) -> None:
        checkpoint.write(prefix)
        files.report_write_point("best.weights", prefix)

    def _sort_steps(self, items: Iterable[ScoredEvaluation]) -> list[int]:
        """Returns the steps of evaluations, the best first."""
        return [item.step for item in self.criterion.sort_best_first(sorted(items))]

    def _warn_of_lost(self, steps: set[int]) -> None:
        """Warns once of weights that should be kept, and that somebody has moved, damaged or removed."""
        if self._folder.is_writer and steps - self._reported_lost_steps:
            _LOG.warning(
                "%s has lost the weights of step %s: they are missing or damaged. The next"
                " evaluation that is better than the existing weights is exported",
                self.export_dir,
                ", ".join(map(str, sorted(steps))),
            )
        self._reported_lost_steps |= steps
