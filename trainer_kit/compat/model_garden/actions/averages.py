"""EMACheckpointing: an Orbit action that saves the moving average of the weights after an evaluation."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from official.modeling.optimization import ExponentialMovingAverage

from trainer_kit.compat.model_garden.training.moving_average import averages_in_place
from trainer_kit.errors import UsageError
from trainer_kit.training.metrics import to_numpy

FOLDER, NAME = "ema_checkpoints", "average_weights"


class EMACheckpointing:
    """Saves a checkpoint that holds the averages in place of the model's weights.

    The checkpoint is `ema_checkpoints/average_weights-<step>` in `export_dir`. Afterwards the model has its weights
    back, bit by bit, even when the save fails. Of several workers only the chief leaves files.

    Args:
      export_dir: The folder that holds `ema_checkpoints`.
      optimizer: Model Garden's ExponentialMovingAverage, or any optimizer if `averaged` is given.
      checkpoint: The model's checkpoint.
      max_to_keep: The number of newest checkpoints to keep.
      averaged: Returns a context manager with the averages in place, for averages that the optimizer does not hold. The
        checkpoint's number is then its global_step.

    Raises:
      UsageError: (a ValueError) for an optimizer that does not average weights.
    """

    def __init__(
        self,
        export_dir: str,
        optimizer: Any,
        checkpoint: tf.train.Checkpoint,
        max_to_keep: int = 1,
        *,
        averaged: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        if averaged is None and not isinstance(optimizer, ExponentialMovingAverage):
            raise UsageError(
                "Optimizer has to be instance of optimization.ExponentialMovingAverage for the EMACheckpointing "
                f"action, but {type(optimizer).__name__} keeps no average of the weights; set optimizer_config.ema"
            )
        self._checkpoint, self._max_to_keep = checkpoint, max_to_keep
        self._averaged = averaged or functools.partial(averages_in_place, optimizer)
        self._counter = checkpoint.global_step if averaged else optimizer.iterations
        self._folder = os.path.join(os.fspath(export_dir), FOLDER)
        tf.io.gfile.makedirs(self._folder)
        self._manager: tf.train.CheckpointManager | None = None
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None  # of a worker that is not the chief

    def __call__(self, output: Any) -> None:
        """Saves the averages; runs eagerly, in strategy scope, on every worker."""
        del output
        if self._manager is None:
            if not tf.distribute.get_strategy().extended.should_checkpoint:
                self._own_folder = tempfile.TemporaryDirectory(prefix="trainer_kit_worker_")
            self._manager = tf.train.CheckpointManager(
                self._checkpoint,
                directory=self._own_folder.name if self._own_folder else self._folder,
                max_to_keep=self._max_to_keep,
                checkpoint_name=NAME,
            )
        with self._averaged():
            self._manager.save(checkpoint_number=int(to_numpy(self._counter)))
