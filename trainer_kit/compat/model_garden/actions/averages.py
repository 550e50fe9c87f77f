"""Saving the moving average of the weights after an evaluation, as an action of Orbit."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.moving_average import exchange
from trainer_kit.training.metrics import to_numpy

FOLDER, NAME = "ema_checkpoints", "average_weights"
_AVERAGING = "official.modeling.optimization.ema_optimizer"


class EMACheckpointing:
    """Saves a checkpoint in which the averages stand in place of the model's weights.

    It goes to `ema_checkpoints/average_weights-<step>` in the folder given. The weights are back afterwards, bit by
    bit, also when the save fails. Of several workers the chief's files stay.

    Args:
      export_dir: what holds `ema_checkpoints`.
      optimizer: Model Garden's ExponentialMovingAverage; any other with `averaged`.
      checkpoint: of the model.
      max_to_keep: how many of the newest stay.
      averaged: returns a context in which the averages are in place, for what averages otherwise; the number of a
        checkpoint is then that of its global_step.

    Raises:
      UsageError: (a ValueError) for an optimizer that averages nothing.
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
        if averaged is None and not is_averaging(optimizer):
            raise UsageError(
                "Optimizer has to be instance of optimization.ExponentialMovingAverage for the EMACheckpointing "
                f"action, but {type(optimizer).__name__} keeps no average of the weights; set optimizer_config.ema"
            )
        self._optimizer, self._checkpoint, self._max_to_keep = optimizer, checkpoint, max_to_keep
        self._averaged = averaged or (lambda: averages_in_place(optimizer))
        self._counter = checkpoint.global_step if averaged else optimizer.iterations
        self._folder = os.path.join(os.fspath(export_dir), FOLDER)
        tf.io.gfile.makedirs(self._folder)
        self._manager: tf.train.CheckpointManager | None = None
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None  # of a worker that is not the chief

    def __call__(self, output: Any) -> None:
        """Saves; eager, in the scope of the strategy, on every worker."""
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


def is_averaging(optimizer: Any) -> bool:
    """Whether this is Model Garden's ExponentialMovingAverage; imports nothing of theirs."""
    module = sys.modules.get(_AVERAGING)
    return module is not None and isinstance(optimizer, module.ExponentialMovingAverage)


@contextlib.contextmanager
def averages_in_place(optimizer: Any) -> Iterator[None]:
    """Exchanges the weights and the averages of Model Garden's optimizer, exactly, and back whatever happens.

    Its own `swap_weights` adds and subtracts, which changes last bits, and where one is infinite makes NaN of both.

    Raises:
      UsageError: before the optimizer has averages.
    """
    if not optimizer.has_shadow_copy:
        raise UsageError("the optimizer has no averages yet; call its shadow_copy(model) first")
    _exchange_all(optimizer)
    try:
        yield
    finally:
        _exchange_all(optimizer)


def _exchange_all(optimizer: Any) -> None:
    averages = list(optimizer._average_weights)
    strategy = getattr(averages[0], "distribute_strategy", None) or tf.distribute.get_strategy()
    exchange(strategy, averages, list(optimizer._model_weights))
