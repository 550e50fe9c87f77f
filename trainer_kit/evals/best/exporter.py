"""Exports the best checkpoints by one criterion: the weights first, the record second.

`ckpt-<step>.*` contains evaluated weights (averaged ones, if there is a moving average), and
`info.json` names the best of them with its metric. It is written after the weights, and weights
that are no longer kept are deleted after it, so that info.json names existing weights at every
moment. The commit record of weights contains the same information, so that a lost or damaged
info.json can be written again.

The recorded evaluations decide which weights are kept (criterion.py). Weights are exported before
their evaluation is recorded. A killed run resumes from its last checkpoint and evaluates some steps
again. It reports the best up to the step it has reached. Weights that it exported later stay in
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
from trainer_kit.evals.ledger import Evaluation, merge_validation_sets
from trainer_kit.telemetry.scalars import flatten_scalars

_LOG = logging.getLogger(__name__)


class BestWeightsExporter:
    """Exports the weights of each evaluation that is kept, across restarts.

    Args:
      export_dir: The folder of the weights and info.json.
      metric_name: The metric's name in the logs of an evaluation. `a|b` is the entry b of the
        nested logs a.
      metric_comp: Which value is better, "higher" or "lower".
      keep: The number of weights to keep.
      min_delta: An evaluation must be better by more than this to displace the worst kept one.
      is_chief: Whether this worker writes the folder. Workers that are not the chief take the same
        decisions and part in each save, since reading a variable can involve all workers, but
        discard what they save.
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
        # The evaluations whose weights are kept, in the order of steps. All workers have the same
        # list and decide by it about exports, since the chief may be changing the folder meanwhile.
        infos = self._folder.read_infos(metric_name)
        evaluations = []
        for step, info in infos.items():
            evaluation = ScoredEvaluation(step, info["value"], info)
            evaluations.append(evaluation)
        self._exported_evaluations = self.criterion.fold(evaluations)

        # The best evaluations, which may have lost their weights
        self._best_so_far = list(self._exported_evaluations)
        # The steps of weights that a warning has named
        self._reported_lost_steps: set[int] = set()
        steps = self._sort_steps(self._exported_evaluations)
        self._folder.update_best(steps)

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, or None before the first.

        The dict is flat, with nested names joined by `|`.
        """
        best = self.criterion.best(self._best_so_far)
        if not best:
            return None
        metrics: dict[str, Any] = best.record["metrics"]
        return metrics

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best so far, or None before the first."""
        best = self.criterion.best(self._best_so_far)
        if not best:
            return None
        return self.metric_name, best.value, best.step

    def resume(self, step: int | None, evaluations: Iterable[Evaluation]) -> None:
        """Selects the weights to keep by the recorded evaluations.

        The run resumes from `step`. Records of several validation sets at one step count as one
        evaluation. If they lack the metric, because the run was killed between two of them, the
        record of that step's weights is used.

        Args:
          step: The step of the restored checkpoint. None for a sidecar, for which all evaluations
            count.
          evaluations: The recorded evaluations that count, with "step" and "metrics", in order,
            later ones included.

        Raises:
          StorageError: when a file cannot be written.
        """
        candidates: list[ScoredEvaluation] = []
        unrecorded = {candidate.step: candidate for candidate in self._exported_evaluations}
        for evaluation in merge_validation_sets(evaluations):
            evaluated_step = evaluation["step"]
            metrics = flatten_scalars(evaluation["metrics"], "|")
            if self.metric_name not in metrics:
                continue
            unrecorded.pop(evaluated_step, None)
            info = build_info(evaluated_step, metrics, self.metric_name)
            value = info["value"]
            if math.isfinite(value):
                candidate = ScoredEvaluation(evaluated_step, value, info)
                candidates.append(candidate)
        candidates += unrecorded.values()

        reached_candidates = [
            candidate for candidate in candidates if step is None or candidate.step <= step
        ]
        self._best_so_far = self.criterion.fold(reached_candidates)

        # Weights that are exported already were checked before.
        exported = {candidate.step: candidate for candidate in self._exported_evaluations}
        whole_steps = set()
        for saved_step in self._folder.steps():
            prefix = self._folder.prefix(saved_step)
            if saved_step in exported or not describe_damage(prefix):
                whole_steps.add(saved_step)

        best_candidates = self.criterion.fold(candidates)
        best_steps = {candidate.step for candidate in best_candidates}
        reached_steps = {candidate.step for candidate in self._best_so_far}
        expected_steps = best_steps & reached_steps
        self._warn_of_lost(expected_steps - whole_steps)

        self._exported_evaluations = []
        whole_candidates = [candidate for candidate in candidates if candidate.step in whole_steps]
        selected = self.criterion.fold(whole_candidates)
        for candidate in sorted(selected):
            exported_evaluation = exported.get(candidate.step)
            # If the values differ, the ledger decides.
            if exported_evaluation is None or exported_evaluation.value != candidate.value:
                self._folder.write_info_record(candidate.record)
                exported_evaluation = candidate
            self._exported_evaluations.append(exported_evaluation)
        steps = self._sort_steps(self._exported_evaluations)
        self._folder.rotate(steps)

    def rewind(self, step: int, evaluations: Iterable[Evaluation]) -> None:
        """Moves superseded weights of steps after `step` to `archived/`, and resumes from `step`.

        Args:
          step: The step that the run goes back to.
          evaluations: The recorded evaluations. See `resume`. Later ones no longer count.

        Raises:
          StorageError: when a file cannot be moved or written.
        """
        self._exported_evaluations = [
            evaluation for evaluation in self._exported_evaluations if evaluation.step <= step
        ]
        later_steps = [saved_step for saved_step in self._folder.steps() if saved_step > step]

        if self._exported_evaluations:
            steps = self._sort_steps(self._exported_evaluations)
            self._folder.update_best(steps)
        elif later_steps:
            self._folder.clear_best()
        if self._folder.is_writer:
            for later_step in later_steps:
                prefix = self._folder.prefix(later_step)
                set_aside(prefix, ARCHIVED)

        reached_records = [record for record in evaluations if record["step"] <= step]
        self.resume(step, reached_records)

    def check_metric(self, names: Iterable[str]) -> None:
        """Checks that evaluations will report the metric as a single number.

        Args:
          names: The names of all metrics that an evaluation reports as single numbers, nested ones
            joined by `|`.

        Raises:
          UsageError: when no evaluation will.
        """
        metric_names = list(names)
        if self.metric_name in metric_names:
            return

        advice = suggest_names(self.metric_name, metric_names)
        all_names = ", ".join(sorted(metric_names))
        more = f" (all: {all_names})" if all_names not in advice else ""
        raise UsageError(
            f"{self._option}: {self.metric_name!r} is not a validation metric, "
            f"or not a single number; {advice}{more}"
        )

    def maybe_export_checkpoint(
        self, checkpoint: tf.train.Checkpoint, eval_logs: Mapping[str, object], step: int
    ) -> bool:
        """Exports `checkpoint` if its evaluation is kept.

        A value that is not finite is never kept. Runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the evaluated weights.
          eval_logs: The evaluation's metrics, possibly nested. Values that are not single numbers
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

        info = build_info(int(step), logs, self.metric_name)
        candidate = ScoredEvaluation(int(step), value, info)
        # The first evaluation of a step counts.
        evaluated_steps = {evaluation.step for evaluation in self._best_so_far}
        was_evaluated = candidate.step in evaluated_steps
        self._best_so_far = self.criterion.select_after(self._best_so_far, candidate)
        exported_steps = {evaluation.step for evaluation in self._exported_evaluations}
        existing_steps = set(self._folder.steps())
        self._warn_of_lost(exported_steps - existing_steps)

        earlier = None
        others = []
        for evaluation in self._exported_evaluations:
            if evaluation.step == candidate.step:
                earlier = evaluation
            else:
                others.append(evaluation)
        # Perhaps the weights were exported before the run was killed.
        if earlier is not None and (was_evaluated or earlier.value == candidate.value):
            return False

        selected = self.criterion.select_after(others, candidate)
        if candidate not in selected:
            return False

        save = functools.partial(self._save, checkpoint)
        steps = self._sort_steps(selected)
        self._folder.write(candidate.step, save, steps, point="best", info=candidate.record)
        self._exported_evaluations = sorted(selected)
        return True

    def _save(self, checkpoint: tf.train.Checkpoint, prefix: str) -> None:
        checkpoint.write(prefix)
        files.report_write_point("best.weights", prefix)

    def _sort_steps(self, items: Iterable[ScoredEvaluation]) -> list[int]:
        """Returns the steps of evaluations, the best first."""
        # Ties keep the order of steps.
        ranking = self.criterion.sort_best_first(sorted(items))
        return [evaluation.step for evaluation in ranking]

    def _warn_of_lost(self, steps: set[int]) -> None:
        """Warns once of weights that should be kept.

        Somebody has moved, damaged or removed them.
        """
        unreported_steps = steps - self._reported_lost_steps
        if self._folder.is_writer and unreported_steps:
            step_names = ", ".join(map(str, sorted(unreported_steps)))
            _LOG.warning(
                "%s has lost the weights of step %s: they are missing or damaged. "
                "The next evaluation that is better than the existing weights is exported",
                self.export_dir,
                step_names,
            )
        self._reported_lost_steps |= steps
