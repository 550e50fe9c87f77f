"""Exports the best checkpoints by one criterion: the weights first, the record second.

`ckpt-<step>.*` holds evaluated weights (averaged ones, if there is a moving average), and `info.json` names the best of
them with its metric. The record is written after the weights, and weights that are no longer kept are deleted after the
record: at every moment info.json names existing weights. The commit record of weights holds the same information, so
that a lost or damaged info.json can be written again.

The recorded evaluations decide which weights are kept (criterion.py). A killed run resumes from its last checkpoint and
evaluates some steps again. It reports the best up to the step it has reached; weights that it exported later stay in
place until the run reaches their step again. A run that goes back by request moves later exports to `archived/`.
Missing weights that should be kept are exported again from the checkpoint of their step (`lost`). If that is missing
too, the next evaluation that is better than the existing weights is exported.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.commit import begin_save, cancel_save, finish_save, read_record, remove_checkpoint
from trainer_kit.checkpoints.startup_scan import ARCHIVED, not_written, remove_debris, set_aside
from trainer_kit.errors import StorageError, UsageError, suggestion
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.criterion import Criterion, Scored
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.evals.best.kept_weights import KeptWeights, info_of
from trainer_kit.telemetry.scalars import flat_scalars

_LOG = logging.getLogger(__name__)


class BestCheckpoint:
    """Exports the weights of each evaluation that is kept, across restarts.

    Args:
      export_dir: The folder of the weights and info.json.
      metric_name: The metric's name in the logs of an evaluation; `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower": which value is better.
      keep: The number of weights to keep.
      min_delta: An evaluation must be better by more than this to displace the worst kept one.
      keeps: Whether this worker writes the folder. False on workers that are not the chief: they take the same
        decisions and part in each save, since reading a variable can involve all workers, but discard what they save.
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
        keeps: bool = True,
        option: str = "trainer.best_checkpoint_eval_metric",
        folder: BestFolder | None = None,
    ) -> None:
        self.export_dir, self.metric_name, self.metric_comp = export_dir, metric_name, metric_comp
        self.criterion = Criterion(metric_name, metric_comp, keep, min_delta)
        self._keeps, self._option = keeps, option
        if keeps:
            remove_debris(export_dir)
        self._weights = KeptWeights(folder or BestFolder(export_dir, keeps), self.criterion)
        self._so_far = self._weights.held

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, flat, nested names joined by `|`; None before the first."""
        best = self.criterion.best(self._so_far)
        return best.record["metrics"] if best else None

    @property
    def metric_names(self) -> list[str]:
        """The metric that decides."""
        return [self.metric_name]

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best so far."""
        best = self.criterion.best(self._so_far)
        return (self.metric_name, best.value, best.step) if best else None

    def resume(self, step: int | None, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Sets the best so far to that of a run which resumes from `step`.

        If the weights are right but info.json or their record is not, the files are written again.

        Args:
          step: The step of the restored checkpoint; None for a sidecar, for which all evaluations count.
          evaluations: The recorded evaluations that count, with "step" and "metrics", in order, later ones included.

        Raises:
          StorageError: when a file cannot be written.
        """
        self._weights.follow(evaluations)
        candidates = self._weights.candidates
        self._so_far = self.criterion.fold(one for one in candidates if step is None or one.step <= step)

    def rewind(self, step: int) -> None:
        """Moves weights of steps after `step`, which are superseded, to `archived/`.

        Raises:
          StorageError: when they cannot be moved.
        """
        self._so_far = [one for one in self._so_far if one.step <= step]
        later = self._weights.forget_after(step)
        if self._keeps:
            for later_step in later:
                set_aside(self._weights.folder.prefix(later_step), ARCHIVED)

    def check_metric(self, names: Iterable[str]) -> None:
        """Raises UsageError when no evaluation will report the metric as a single number.

        Args:
          names: The names of all metrics that an evaluation reports as single numbers, nested ones joined by `|`.
        """
        known = list(names)
        if self.metric_name not in known:
            advice, names = suggestion(self.metric_name, known), ", ".join(sorted(known))
            raise UsageError(
                f"{self._option}: {self.metric_name!r} is not a validation metric, or not a single number; {advice}"
                + (f" (all: {names})" if names not in advice else "")
            )

    def maybe_export_checkpoint(
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        step: int,
        not_evaluated: Collection[str] = (),
    ) -> bool:
        """Exports `checkpoint` if its evaluation is kept; a value that is not finite is never kept.

        Runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the evaluated weights.
          eval_logs: The evaluation's metrics, possibly nested; values that are not single numbers are left out.
          step: The global step of the weights.
          not_evaluated: The validation sets that this evaluation leaves out; by a metric of theirs nothing is exported.

        Returns:
          Whether it was exported.

        Raises:
          UsageError: when the metric is not among the logs, or is not a single number.
          StorageError: when the weights or the record cannot be written.
        """
        if any(self.metric_name.startswith(f"{name}|") for name in not_evaluated):
            return False
        logs = flat_scalars(eval_logs, "|")
        self.check_metric(logs)
        value = logs[self.metric_name]
        if not math.isfinite(value):
            _LOG.warning("%s is %s at step %d: not a candidate for the best checkpoint", self.metric_name, value, step)
            return False
        new = Scored(int(step), value, info_of(int(step), logs, self.metric_name))
        known = any(one.step == new.step for one in self._so_far)  # the first evaluation of a step counts
        self._so_far = self.criterion.add(self._so_far, new)
        held = self._weights.with_new(new, known)
        if held is None:
            return False  # perhaps it was exported before the run was killed
        self._export(checkpoint, new, held)
        self._weights.only_held()
        return True

    def lost(self, saved: Callable[[int], bool]) -> list[int]:
        """Returns the steps of missing weights that should be kept and can be exported from checkpoints.

        Call it after a resume. Warns once of weights without a checkpoint, unless the run will reach their step again.

        Args:
          saved: Returns whether the checkpoint of a step exists and is whole.
        """
        steps, gone = self._weights.lost(saved)
        so_far = {one.step for one in self._so_far}
        for one in gone:
            if one.step in so_far:
                _LOG.warning("%s", self._weights.told_of_gone(one))
        return steps

    def put_back(self, checkpoint: tf.train.Checkpoint, step: int) -> None:
        """Exports the weights of a step that `lost` returned; runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the weights as they were evaluated.
          step: The step of the weights.

        Raises:
          StorageError: when they cannot be written.
        """
        one, held = self._weights.with_lost(step)
        self._export(checkpoint, one, held)
        self._weights.remove_others()
        _LOG.info(
            "%s: the weights of step %d (%s %s) were missing; they were exported from the checkpoint of that step",
            *(self.export_dir, step, self.metric_name, one.value),
        )

    def _export(self, checkpoint: tf.train.Checkpoint, new: Scored, held: list[Scored]) -> None:
        prefix = self._weights.folder.prefix(new.step)
        try:
            if self._keeps:
                self._save(checkpoint, begin_save(prefix))
                files.reach("best.weights", prefix)
                finish_save(prefix, point="best", info=new.record)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    self._save(checkpoint, os.path.join(folder, os.path.basename(prefix)))
            self._weights.hold(held, new)
        except (tf.errors.OpError, OSError, StorageError) as error:
            info = read_info(self.export_dir, quiet=True) or {}
            if self._keeps and not cancel_save(prefix) and read_record(prefix) and info.get("step") != new.step:
                remove_checkpoint(prefix)
            raise not_written(f"the best checkpoint {prefix} was not written", self.export_dir, error) from error

    def _save(self, checkpoint: tf.train.Checkpoint, prefix: str) -> None:
        checkpoint.write(prefix)
