"""The best checkpoint, by Model Garden's names and in files that its programs read."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.compat.model_garden.actions.best_folder import GardenBestFolder, nested
from trainer_kit.errors import ConfigError, Mistake, UsageError, suggestion
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.info_json import GARDEN_STEP, INFO
from trainer_kit.telemetry.scalars import flat_scalars
from trainer_kit.training.metrics import to_numpy

_LOG = logging.getLogger(__name__)
_OPTION = "trainer.best_checkpoint_metric_comp"


class BestCheckpointExporter(BestCheckpoint):
    """Exports the weights of each evaluation that is better than all before, over restarts too.

    The weights are written before the record that names them, a value that is not finite is never best, and a damaged
    info.json is made again. The runner of trainer_kit resumes and rewinds it like its own.

    Args:
      export_dir: local folder of the weights and of info.json; the first export makes it.
      metric_name: in the logs of an evaluation; `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower", what is better.
      keeps: whether anything stays in the folder; None: on the chief, by the strategy in whose scope this is made.

    Raises:
      UsageError: (a ValueError) for another comparison, or a folder that is not local.
      StorageError: when best weights of Model Garden cannot be taken over.
    """

    def __init__(self, export_dir: str, metric_name: str, metric_comp: str, *, keeps: bool | None = None) -> None:
        if metric_comp not in ("higher", "lower"):
            advice = suggestion(str(metric_comp), ("higher", "lower"))
            problem = f"best checkpoint metric comp must be one of higher, lower. Got: {metric_comp!r}"
            raise ConfigError([Mistake(_OPTION, problem, advice)])
        if files.is_remote(export_dir):
            raise UsageError(f"the best checkpoint is kept in a local folder, not in {export_dir}")
        if keeps is None:
            keeps = bool(tf.distribute.get_strategy().extended.should_checkpoint)
        folder = GardenBestFolder(export_dir, keeps)
        folder.adopt(metric_name)
        super().__init__(export_dir, metric_name, metric_comp, keeps=keeps, folder=folder)
        self._last: _Logs | None = None
        if (best := self.criterion.best(self._so_far)) is not None:
            folder.name(best.record)  # a process may have died between weights and record

    def maybe_export_checkpoint(  # type: ignore[override]
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        global_step: Any,
        write_logs: bool = True,
        *,
        not_evaluated: Collection[str] = (),
    ) -> bool:
        """Exports `checkpoint` if its evaluation is the best so far; eager, on every worker.

        Args:
          checkpoint: of the weights that were evaluated.
          eval_logs: the evaluation's metrics; may be nested. What is no single number is left out.
          global_step: of the weights.
          write_logs: whether `export_best_eval_metric` is called; the record of the weights is written in any case.
          not_evaluated: validation sets, of several, that this evaluation leaves out.

        Returns:
          Whether it was exported.

        Raises:
          UsageError: (a ValueError) when the metric is not among the logs, or is no single number.
          StorageError: when the weights or the record cannot be written.
        """
        logs, step = numbers(eval_logs), int(to_numpy(global_step))
        self._forget_if_better(logs, step)
        exported = super().maybe_export_checkpoint(checkpoint, logs, step, not_evaluated)
        if exported and write_logs:
            self.export_best_eval_metric(logs, step)
        if self.metric_name in flat_scalars(logs, "|"):
            self._last = _Logs(logs, step)
        return exported

    def export_best_eval_metric(self, eval_logs: Mapping[str, Any], global_step: Any) -> None:
        """Writes info.json: the metrics that are single numbers, and the step. Called after each export.

        Raises:
          StorageError: when it cannot be written.
        """
        if not self._keeps:
            return
        content = {**numbers(eval_logs), GARDEN_STEP: float(to_numpy(global_step))}
        if files.read_json(self.best_ckpt_logs_path) != content:
            files.write_json(self.best_ckpt_logs_path, content, point="best.info")

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, nested as they came; a name joined by `|` is found as well.

        While no evaluation had a finite metric, those of the last one; None before the first.
        """
        best = self.criterion.best(self._so_far)
        return _Logs(nested(best.record["metrics"]), best.step) if best else self._last

    @property
    def best_ckpt_logs_path(self) -> str:
        """The path of info.json."""
        return os.path.join(self.export_dir, INFO)

    @property
    def best_ckpt_path(self) -> str | None:
        """The path of the best weights, without suffixes; None if there are none yet."""
        found = tf.train.latest_checkpoint(self.export_dir)
        return None if found is None else str(found)

    def _forget_if_better(self, logs: Mapping[str, Any], step: int) -> None:
        """Lets a step that is evaluated a second time, and is better now, be exported again, as Model Garden does."""
        value = flat_scalars(logs, "|").get(self.metric_name, math.nan)
        sign = 1.0 if self.metric_comp == "higher" else -1.0
        self._so_far = [one for one in self._so_far if one.step != step or not sign * (value - one.value) > 0]

    def _save(self, checkpoint: tf.train.Checkpoint, name: str) -> None:
        _ = checkpoint.save_counter  # made now, it is saved too, and restore(...).assert_consumed() finds it
        super()._save(checkpoint, name)


def maybe_create_best_ckpt_exporter(params: Any, data_dir: str) -> Any:
    """Returns what keeps the best checkpoint as the config says; None when it names no metric or no folder.

    Args:
      params: the experiment's config, of trainer_kit or of Model Garden.
      data_dir: what holds the folder of the best checkpoint; the model_dir.
    """
    options = params.trainer
    folder, metric = options.best_checkpoint_export_subdir, options.best_checkpoint_eval_metric
    if not (data_dir and folder and metric):
        return None
    _LOG.info("the best checkpoint by %s is kept in %s", metric, os.path.join(data_dir, folder))
    return BestCheckpointExporter(os.path.join(data_dir, folder), metric, options.best_checkpoint_metric_comp)


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the single numbers of nested logs as floats, in their order."""
    return nested(flat_scalars(logs, "|"))


class _Logs(dict[str, Any]):
    """Nested metrics that also know names joined by `|`, and their step."""

    def __init__(self, logs: Mapping[str, Any], step: int) -> None:
        super().__init__(logs)
        self._step = step

    def __missing__(self, key: str) -> Any:
        if key == GARDEN_STEP:
            return float(self._step)
        found: Any = dict(self)
        for name in key.split("|"):
            found = found[name]
        return found
