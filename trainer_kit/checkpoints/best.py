"""The best checkpoint: weights first, record second.

`best_ckpt/ckpt-<step>.*` holds the weights that were evaluated (averaged ones, if there is a moving average), and
`info.json` names them with their metric. The record is written when the weights are there, and the weights of the
best before are deleted when the record is there: at every moment info.json tells of weights that exist.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import operator
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError, suggestion
from trainer_kit.scalars import flat_scalars

INFO = "info.json"
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
        info = read_info(export_dir)
        self._info = info if info and info["metric"] == metric_name else None

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, flat, nested names joined by `|`; None before the first."""
        return self._info["metrics"] if self._info else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best so far."""
        return (self.metric_name, self._info["value"], self._info["step"]) if self._info else None

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
        if self._info and not self._better(value, self._info["value"]):
            return False
        self._export(checkpoint, logs, value, int(step))
        return True

    def _export(self, checkpoint: tf.train.Checkpoint, logs: dict[str, float], value: float, step: int) -> None:
        name = f"ckpt-{step}"
        self._save(checkpoint, name)
        info = {
            "checkpoint": name,
            "step": step,
            "metric": self.metric_name,
            "value": value,
            "metrics": logs,
        }
        before, self._info = self._info, info
        if not self._keeps:
            return
        files.write_json(os.path.join(self.export_dir, INFO), info, point="best.info")
        if before and before["checkpoint"] != name:
            for path in tf.io.gfile.glob(os.path.join(self.export_dir, before["checkpoint"] + ".*")):
                tf.io.gfile.remove(path)

    def _save(self, checkpoint: tf.train.Checkpoint, name: str) -> None:
        with contextlib.ExitStack() as stack:
            folder = self.export_dir if self._keeps else stack.enter_context(tempfile.TemporaryDirectory())
            try:
                tf.io.gfile.makedirs(folder)
                checkpoint.write(os.path.join(folder, name))
            except tf.errors.OpError as error:
                raise StorageError(f"the best checkpoint cannot be saved in {folder}: {error.message}") from error


def read_info(export_dir: str) -> dict[str, Any] | None:
    """Returns what info.json tells of the best checkpoint; None if there is none or it cannot be read (a warning)."""
    path = os.path.join(export_dir, INFO)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            info = json.load(stream)
        known = {key: kind(info[key]) for key, kind in (("checkpoint", str), ("step", int), ("value", float))}
        return {**info, **known, "metric": str(info["metric"]), "metrics": dict(info["metrics"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        _LOG.warning("%s cannot be read (%s); the best is chosen anew from the next evaluation on", path, error)
        return None
