"""The best checkpoint exporter with Model Garden's names, and with files that Model Garden's programs can read."""

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
    """Exports the weights of each evaluation that is better than all earlier ones, across restarts.

    The weights are written before the record that names them, a value that is not finite is never best, and a damaged
    info.json is rebuilt. trainer_kit's runner resumes and rewinds this exporter like its own.

    Args:
      export_dir: The local folder of the weights and of info.json; the first export creates it.
      metric_name: A metric in the evaluation logs; `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower": which value is better.
      keeps: Whether this process keeps files in the folder; None: if it is the chief of the current strategy.

    Raises:
      UsageError: (a ValueError) for an unknown comparison, or a folder that is not local.
      StorageError: when Model Garden's best weights cannot be taken over, or their second name cannot be removed.
    """

    def __init__(self, export_dir: str, metric_name: str, metric_comp: str, *, keeps: bool | None = None) -> None:
        if metric_comp not in ("higher", "lower"):
            advice = suggestion(str(metric_comp), ("higher", "lower"))
            problem = f"best checkpoint metric comp must be one of higher, lower. Got: {metric_comp!r}"
            raise ConfigError([Mistake(_OPTION, problem, advice)])
        if files.is_remote(export_dir):
            raise UsageError(f"the best checkpoint has to be in a local folder, not in {export_dir}")
        if keeps is None:
            keeps = bool(tf.distribute.get_strategy().extended.should_checkpoint)
        folder = GardenBestFolder(export_dir, keeps)
        folder.adopt(metric_name)
        super().__init__(export_dir, metric_name, metric_comp, keeps=keeps, folder=folder)
        self._last: _Logs | None = None
        if (best := self.criterion.best(self._so_far)) is not None:
            folder.name(best.record)  # a process may have died between weights and record
        folder.remove_second_names()

    def maybe_export_checkpoint(  # type: ignore[override]
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        global_step: Any,
        write_logs: bool = True,
        *,
        not_evaluated: Collection[str] = (),
    ) -> bool:
        """Exports `checkpoint` if its evaluation is the best so far; runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the evaluated weights.
          eval_logs: The evaluation's metrics, which may be nested. Values that are not single numbers are left out.
          global_step: The step of the weights.
          write_logs: Whether to call a subclass's own `export_best_eval_metric`; info.json is written in any case.
          not_evaluated: The validation sets that this evaluation left out.

        Returns:
          Whether the checkpoint was exported.

        Raises:
          UsageError: (a ValueError) when the metric is not in the logs, or is not a single number.
          StorageError: when the weights or the record cannot be written.
        """
        logs, step = numbers(eval_logs), int(to_numpy(global_step))
        self._forget_if_better(logs, step)
        exported = super().maybe_export_checkpoint(checkpoint, logs, step, not_evaluated)
        overridden = type(self).export_best_eval_metric is not BestCheckpointExporter.export_best_eval_metric
        if exported and write_logs and overridden:  # else info.json is written already
            self.export_best_eval_metric(logs, step)
        if self.metric_name in flat_scalars(logs, "|"):
            self._last = _Logs(logs, step)
        return exported

    def export_best_eval_metric(self, eval_logs: Mapping[str, Any], global_step: Any) -> None:
        """Writes info.json: the step, and the metrics that are single numbers.

        If a subclass overrides this method, the override is called after each export.

        Raises:
          StorageError: when info.json cannot be written.
        """
        if self._keeps:
            content = {**numbers(eval_logs), GARDEN_STEP: float(to_numpy(global_step))}
            files.write_json(self.best_ckpt_logs_path, content, point="best.info")

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, nested as they were; names joined by `|` can be looked up too.

        Until an evaluation has a finite metric, these are the last evaluation's; None before the first evaluation.
        """
        best = self.criterion.best(self._so_far)
        return _Logs(nested(best.record["metrics"]), best.step) if best else self._last

    @property
    def best_ckpt_logs_path(self) -> str:
        """The path of info.json."""
        return os.path.join(self.export_dir, INFO)

    @property
    def best_ckpt_path(self) -> str | None:
        """The checkpoint prefix of the best weights; None if there are none yet."""
        found = tf.train.latest_checkpoint(self.export_dir)
        return None if found is None else str(found)

    def _forget_if_better(self, logs: Mapping[str, Any], step: int) -> None:
        """Forgets the earlier result of `step` if this one is better: it is exported again, as in Model Garden."""
        value = flat_scalars(logs, "|").get(self.metric_name, math.nan)
        sign = 1.0 if self.metric_comp == "higher" else -1.0
        self._so_far = [one for one in self._so_far if one.step != step or not sign * (value - one.value) > 0]

    def _save(self, checkpoint: tf.train.Checkpoint, name: str) -> None:
        _ = checkpoint.save_counter  # created now, it is saved too, so that restore(...).assert_consumed() passes
        super()._save(checkpoint, name)


def maybe_create_best_ckpt_exporter(params: Any, data_dir: str) -> Any:
    """Returns an exporter of the best checkpoint; None when the config names no metric or no folder.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      data_dir: The parent of the best checkpoint's folder: the model_dir.
    """
    options = params.trainer
    folder, metric = options.best_checkpoint_export_subdir, options.best_checkpoint_eval_metric
    if not (data_dir and folder and metric):
        return None
    _LOG.info("the best checkpoint by %s is kept in %s", metric, os.path.join(data_dir, folder))
    return BestCheckpointExporter(os.path.join(data_dir, folder), metric, options.best_checkpoint_metric_comp)


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested logs with their single numbers as floats, in the same order; other values are left out."""
    return nested(flat_scalars(logs, "|"))


class _Logs(dict[str, Any]):
    """Nested metrics that can also be looked up by names joined by `|`; the step is one of them."""

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
