"""The best checkpoint: weights first, record second.

`best_ckpt/ckpt-<step>.*` holds the weights that were evaluated (averaged ones, if there is a moving average), and
`info.json` names them with their metric. The record is written when the weights are there, and the weights of the
best before are deleted when the record is there: at every moment info.json tells of weights that exist. The commit
record of the weights holds the same, so that an info.json that is lost or damaged can be made again.

A run that was killed goes back to its last checkpoint and evaluates some steps again. What it reports as the best so
far is the best up to the step it has reached; the better one that it had already exported stays where it is, until the
run comes to that step again. A run that goes back for good moves what it exported later to `archived/`, and exports the
next evaluation: the best that it can still give weights for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.best_info import INFO, is_info, read_info
from trainer_kit.checkpoints.commit import commit, problem, read_record
from trainer_kit.checkpoints.folder import ARCHIVED, not_written, remove_debris, remove_unfinished, set_aside
from trainer_kit.checkpoints.names import RECORD, complete_checkpoints, owner
from trainer_kit.errors import StorageError, UsageError, suggestion
from trainer_kit.scalars import flat_scalars

_LOG = logging.getLogger(__name__)


class BestCheckpoint:
    """Exports the weights whenever an evaluation is better than all before, over restarts too.

    Args:
      export_dir: folder of the best weights and of info.json.
      metric_name: in the logs of an evaluation; `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower", what is better.
      keeps: whether anything stays in the folder. False on workers that are not the chief: they decide alike and take
        part in each save, since reading a variable can take all workers, but what they save is thrown away.
    """

    def __init__(self, export_dir: str, metric_name: str, metric_comp: str = "higher", *, keeps: bool = True) -> None:
        self.export_dir = export_dir
        self.metric_name = metric_name
        self._keeps = keeps
        self._better = {"higher": operator.gt, "lower": operator.lt}[metric_comp]
        self.metric_comp = metric_comp
        info = self._recovered()  # all workers come to the same, one of them writes
        self._info = info if info and info["metric"] == metric_name else None
        self._so_far: dict[str, Any] | None = self._info
        if keeps and info:
            self._remove_others(info["checkpoint"])

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, flat, nested names joined by `|`; None before the first."""
        return self._so_far["metrics"] if self._so_far else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best so far."""
        return (self.metric_name, self._so_far["value"], self._so_far["step"]) if self._so_far else None

    def resume(self, step: int | None, evaluated: Mapping[str, Any] | None) -> None:
        """Makes the best so far that of a run which goes on from `step`.

        If info.json and the record of the weights are lost, and the weights are those of `evaluated`, it is made again.

        Args:
          step: of the checkpoint that was restored; None for an evaluation beside a run: all that was found counts.
          evaluated: the best evaluation up to there, as the ledger has it: "step" and "metrics"; None if it has none.

        Raises:
          StorageError: when info.json cannot be written.
        """
        told = self._info_of(evaluated["step"], evaluated["metrics"]) if evaluated is not None else None
        if told and not self._info and self._holds(told):
            self._info = self._made_again(told, logging.INFO)
        self._so_far = self._info if self._info and (step is None or self._info["step"] <= step) else None
        if told and (self._so_far is None or self._better(told["value"], self._so_far["value"])):
            self._so_far = told

    def rewind(self, step: int) -> None:
        """Takes what was found after `step`, which is no part of the run any more, to `archived/`.

        Raises:
          StorageError: when it cannot be moved.
        """
        if self._info and self._info["step"] > step:
            if self._keeps:
                set_aside(os.path.join(self.export_dir, self._info["checkpoint"]), ARCHIVED)
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self.export_dir, INFO))
            self._info = None
        if self._so_far and self._so_far["step"] > step:
            self._so_far = None

    def check_metric(self, names: Iterable[str]) -> None:
        """Raises UsageError, with those that exist, when no evaluation will report the metric as a single number.

        Args:
          names: of all metrics that an evaluation reports as single numbers, nested ones joined by `|`.
        """
        known = list(names)
        if self.metric_name not in known:
            raise UsageError(
                f"trainer.best_checkpoint_eval_metric: {self.metric_name!r} is no validation metric, or not a single "
                f"number; {suggestion(self.metric_name, known)} (all: {', '.join(sorted(known))})"
            )

    def maybe_export_checkpoint(self, checkpoint: tf.train.Checkpoint, eval_logs: Mapping[str, Any], step: int) -> bool:
        """Exports `checkpoint` if its evaluation is the best so far; values that are not finite never are.

        Eager, on every worker.

        Args:
          checkpoint: of the weights that were evaluated.
          eval_logs: the evaluation's metrics; may be nested. What is no single number is left out.
          step: global step of the weights.

        Returns:
          Whether it was exported.

        Raises:
          UsageError: when the metric is not among the logs, or is no single number.
          StorageError: when the weights or the record cannot be written.
        """
        logs = flat_scalars(eval_logs, "|")
        self.check_metric(logs)
        value = logs[self.metric_name]
        if not math.isfinite(value):
            _LOG.warning("%s is %s at step %d: not a candidate for the best checkpoint", self.metric_name, value, step)
            return False
        info = self._info_of(int(step), logs)
        if self._so_far is None or self._better(value, self._so_far["value"]):
            self._so_far = info
        if self._info and not self._better(value, self._info["value"]):
            return False  # perhaps of a later step, exported before the run was killed
        self._export(checkpoint, info)
        return True

    def _info_of(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        flat = flat_scalars(metrics, "|")
        value = flat[self.metric_name]
        return {"checkpoint": f"ckpt-{step}", "step": step, "metric": self.metric_name, "value": value, "metrics": flat}

    def _export(self, checkpoint: tf.train.Checkpoint, info: dict[str, Any]) -> None:
        prefix = os.path.join(self.export_dir, info["checkpoint"])
        try:
            self._save(checkpoint, info["checkpoint"])
            if self._keeps:
                files.reach("best.weights", prefix)
                commit(prefix, point="best.record", info=info)
                files.write_json(os.path.join(self.export_dir, INFO), info, point="best.info")
        except (tf.errors.OpError, OSError, StorageError) as error:
            if self._keeps:
                remove_unfinished(prefix)
            raise not_written(f"the best checkpoint {prefix} was not written", self.export_dir, error) from error
        self._info = info
        if self._keeps:
            self._remove_others(info["checkpoint"])

    def _remove_others(self, name: str) -> None:
        """Removes all weights but those of `name`, and what a process that died here has left."""
        remove_debris(self.export_dir)
        for path in tf.io.gfile.glob(os.path.join(self.export_dir, "ckpt-*")):
            if owner(os.path.basename(path)) not in (name, None):
                files.reach("best.remove", path)
                tf.io.gfile.remove(path)

    def _recovered(self) -> dict[str, Any] | None:
        """Returns what info.json tells, if its weights are there; else makes it again from the weights that are."""
        path = os.path.join(self.export_dir, INFO)
        info = read_info(self.export_dir, quiet=True)
        if info is not None and self._holds(info):
            return info
        found: list[dict[str, Any]] = []
        for prefix in complete_checkpoints(self.export_dir).values():
            noted = (read_record(prefix) or {}).get("info", {})
            if is_info(noted) and noted["metric"] == self.metric_name and not problem(prefix):
                found.append(noted)
        best = max(found, key=lambda one: one["value"] if self.metric_comp == "higher" else -one["value"], default=None)
        if best is not None:
            return self._made_again(best, logging.WARNING)
        if self._keeps and os.path.exists(path):
            told = "names weights that are not whole" if info else "is damaged, and no weights beside it tell of theirs"
            _LOG.warning("%s %s; unless the ledger tells, the best is chosen anew from the next evaluation", path, told)
        return None

    def _holds(self, info: Mapping[str, Any]) -> bool:
        """Whether the weights that `info` tells of are there, and whole."""
        return not problem(os.path.join(self.export_dir, info["checkpoint"]))

    def _made_again(self, info: dict[str, Any], level: int) -> dict[str, Any]:
        if self._keeps:
            path = os.path.join(self.export_dir, INFO)
            files.write_json(path, info, point="best.info")
            _LOG.log(
                level, "%s was missing or damaged; it was made again: its weights are of step %d", path, info["step"]
            )
        return info

    def _save(self, checkpoint: tf.train.Checkpoint, name: str) -> None:
        with contextlib.ExitStack() as stack:
            folder = self.export_dir if self._keeps else stack.enter_context(tempfile.TemporaryDirectory())
            tf.io.gfile.makedirs(folder)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name) + RECORD)  # of weights that are written over
            checkpoint.write(os.path.join(folder, name))
