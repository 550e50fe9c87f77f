"""The best checkpoints by one criterion: weights first, record second.

`ckpt-<step>.*` holds weights that were evaluated (averaged ones, if there is a moving average), and `info.json` names
the best of them with its metric. The record is written when the weights are there, and weights that are kept no more
are deleted when the record is there: at every moment info.json tells of weights that exist. The commit record of
weights holds the same of them, so that an info.json that is lost or damaged can be made again.

What is kept follows from the evaluations on record (criterion.py). A run that was killed goes back to its last
checkpoint and evaluates some steps again. What it reports as the best so far is the best up to the step it has reached;
what it had exported later stays where it is, until the run comes to that step again. A run that goes back for good
moves what it exported later to `archived/`. Weights that are to be kept and are gone are exported again from the
checkpoint of their step, if that is there (`lost`); if not, the next evaluation is exported that is better than what
there are weights of.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD
from trainer_kit.checkpoints.startup_scan import ARCHIVED, not_written, remove_debris, remove_unfinished, set_all_aside
from trainer_kit.checkpoints.unfinished import mark, unmark
from trainer_kit.errors import StorageError, UsageError, suggestion
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.criterion import Criterion, Scored
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.evals.best.kept_weights import KeptWeights, info_of
from trainer_kit.folder_identity import make_folder
from trainer_kit.telemetry.scalars import flat_scalars

_LOG = logging.getLogger(__name__)


class BestCheckpoint:
    """Exports the weights of each evaluation that is to be kept, over restarts too.

    Args:
      export_dir: folder of the weights and of info.json.
      metric_name: in the logs of an evaluation; `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower", what is better.
      keep: how many are kept.
      min_delta: by how much more than this another has to be better, to displace the worst that is kept.
      keeps: whether anything stays in the folder. False on workers that are not the chief: they decide alike and take
        part in each save, since reading a variable can take all workers, but what they save is thrown away.
      option: of the config, that names the metric; for messages.
      folder: the files of `export_dir`, where they have another form than that of BestFolder.

    Attributes:
      criterion: what is kept.
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
        """Makes the best so far that of a run which goes on from `step`.

        Where the weights are right and info.json or their record is not, those are made again.

        Args:
          step: of the checkpoint that was restored; None for an evaluation beside a run: all that was found counts.
          evaluations: those on record that count, "step" and "metrics" of each, in their order, later ones included.

        Raises:
          StorageError: when a file cannot be written.
        """
        self._weights.follow(evaluations)
        candidates = self._weights.candidates
        self._so_far = self.criterion.fold(one for one in candidates if step is None or one.step <= step)

    def rewind(self, step: int) -> None:
        """Takes what was found after `step`, which is no part of the run any more, to `archived/`.

        Raises:
          StorageError: when it cannot be moved.
        """
        self._so_far = [one for one in self._so_far if one.step <= step]
        later = self._weights.forget_after(step)
        if self._keeps:
            set_all_aside(map(self._weights.folder.prefix, later), ARCHIVED)

    def check_metric(self, names: Iterable[str]) -> None:
        """Raises UsageError, with those that exist, when no evaluation will report the metric as a single number.

        Args:
          names: of all metrics that an evaluation reports as single numbers, nested ones joined by `|`.
        """
        known = list(names)
        if self.metric_name not in known:
            advice, names = suggestion(self.metric_name, known), ", ".join(sorted(known))
            raise UsageError(
                f"{self._option}: {self.metric_name!r} is no validation metric, or not a single number; {advice}"
                + (f" (all: {names})" if names not in advice else "")
            )

    def maybe_export_checkpoint(
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        step: int,
        not_evaluated: Collection[str] = (),
    ) -> bool:
        """Exports `checkpoint` if its evaluation is to be kept; values that are not finite never are.

        Eager, on every worker.

        Args:
          checkpoint: of the weights that were evaluated.
          eval_logs: the evaluation's metrics; may be nested. What is no single number is left out.
          step: global step of the weights.
          not_evaluated: validation sets, of several, that this evaluation leaves out; a metric of theirs decides
            nothing now.

        Returns:
          Whether it was exported.

        Raises:
          UsageError: when the metric is not among the logs, or is no single number.
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
        known = any(one.step == new.step for one in self._so_far)  # and its first evaluation counts
        self._so_far = self.criterion.add(self._so_far, new)
        held = self._weights.with_new(new, known)
        if held is None:
            return False  # perhaps it was exported before the run was killed
        self._export(checkpoint, new, held)
        self._weights.only_held()
        return True

    def lost(self, saved: Callable[[int], bool]) -> list[int]:
        """Returns the steps of weights that are to be kept and are not there, but can be had from checkpoints.

        A warning tells of those that cannot, once, unless the run comes to their step again. After a resume.

        Args:
          saved: returns whether the checkpoint of a step is there and whole.
        """
        steps, gone = self._weights.lost(saved)
        so_far = {one.step for one in self._so_far}
        for one in gone:
            if one.step in so_far:
                _LOG.warning("%s", self._weights.told_of_gone(one))
        return steps

    def put_back(self, checkpoint: tf.train.Checkpoint, step: int) -> None:
        """Exports the weights of a step that `lost` has named; eager, on every worker.

        Args:
          checkpoint: of the weights as they were evaluated.
          step: of the weights.

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
        folder = self._weights.folder
        prefix = folder.prefix(new.step)
        try:
            if self._keeps:
                mark([prefix])
            self._save(checkpoint, os.path.basename(prefix))
            if self._keeps:
                files.reach("best.weights", prefix)
                folder.note(new.record)
                unmark([prefix])
            self._weights.hold(held, new)
        except (tf.errors.OpError, OSError, StorageError) as error:
            told = read_info(self.export_dir, quiet=True) or {}
            if self._keeps and told.get("step") != new.step:
                with contextlib.suppress(OSError):
                    os.remove(prefix + RECORD)
                remove_unfinished(prefix)
                unmark([prefix])
            raise not_written(f"the best checkpoint {prefix} was not written", self.export_dir, error) from error

    def _save(self, checkpoint: tf.train.Checkpoint, name: str) -> None:
        with contextlib.ExitStack() as stack:
            folder = self.export_dir if self._keeps else stack.enter_context(tempfile.TemporaryDirectory())
            tf.io.gfile.makedirs(folder) if files.is_remote(folder) else make_folder(folder)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name) + RECORD)  # of weights that are written over
            checkpoint.write(os.path.join(folder, name))
