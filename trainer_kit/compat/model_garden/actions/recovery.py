"""Orbit actions that restore a checkpoint after a divergence; trainer_kit's Trainer recovers without them."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.training.metrics import to_numpy

_LOG = logging.getLogger(__name__)


class RecoveryCondition:
    """Decides after each training loop whether the loss has diverged.

    Args:
      global_step: The trainer's global step.
      loss_upper_bound: The largest allowed loss. A loss that is not finite, -inf included, has always diverged.
      recovery_begin_steps: The first step at which the bound applies.
      recovery_max_trials: The number of recoveries allowed; one more divergence is an error.
    """

    def __init__(
        self,
        global_step: tf.Variable,
        loss_upper_bound: float,
        recovery_begin_steps: int = 0,
        recovery_max_trials: int = 3,
    ) -> None:
        self.recover_counter = 0
        self.recovery_begin_steps = recovery_begin_steps
        self.recovery_max_trials = recovery_max_trials
        self.loss_upper_bound = loss_upper_bound
        self.global_step = global_step

    def __call__(self, outputs: dict[str, Any]) -> bool:
        """Returns whether the run has to be restored; runs eagerly, on the host.

        Args:
          outputs: The logs of the loop, with "training_loss".

        Raises:
          DivergedError: (a RuntimeError) when no recovery is left.
          UsageError: when the logs have no training loss.
        """
        if "training_loss" not in outputs:
            raise UsageError(
                f"a training loop returned {', '.join(outputs) or 'no logs'} and no training_loss, by which a run "
                "recovers from a divergence; return it from train_loop_end, or set trainer.recovery_max_trials=-1"
            )
        loss = float(np.asarray(to_numpy(outputs["training_loss"])).item())
        step = int(to_numpy(self.global_step))
        too_large = step >= self.recovery_begin_steps and loss > self.loss_upper_bound
        if math.isfinite(loss) and not too_large:
            return False
        self.recover_counter += 1
        if self.recover_counter > self.recovery_max_trials:
            raise DivergedError(
                f"{self._what_happened(loss, step)}, and recovery_max_trials={self.recovery_max_trials} is used up; "
                "lower the learning rate or clip gradients"
            )
        return True

    def _what_happened(self, loss: float, step: int) -> str:
        """Returns a description that begins with Model Garden's words, because programs match its text."""
        description = f"training_loss is {loss:g} at step {step}"
        if math.isnan(loss):
            return f"The loss value is NaN after training loop: {description}, not finite"
        if math.isinf(loss):
            return f"The loss value is {loss}: {description}, not finite"
        bound = self.loss_upper_bound
        return f"The loss value is {loss}, which is larger than the bound {bound}: {description}, more than {bound:g}"


class RecoveryAction:
    """Restores the newest checkpoint whose numbers are all finite.

    Args:
      checkpoint_manager: A checkpoint manager of TensorFlow or of trainer_kit.
    """

    def __init__(self, checkpoint_manager: tf.train.CheckpointManager) -> None:
        self.checkpoint_manager = checkpoint_manager

    def __call__(self, _: Any) -> None:
        """Restores the checkpoint; runs eagerly, in strategy scope.

        The manager's init_fn is not used: at best it loads initial weights, and it leaves the optimizer's state, and
        for most models the weights, diverged.

        Raises:
          DivergedError: (a RuntimeError) when there is no such checkpoint.
        """
        manager = self.checkpoint_manager
        manager.sync()
        there = [manager.latest_checkpoint, *reversed(manager.checkpoints)]
        for path in dict.fromkeys(filter(None, there)):
            if wrong := _unsound(path):
                _LOG.warning("%s is skipped: %s", path, wrong)
                continue
            _restore(manager, path)
            _LOG.warning("the run has diverged; %s was restored", path)
            return
        raise DivergedError(
            f"the run has diverged, and {manager.directory} holds no checkpoint whose numbers are all finite; save one "
            "before the first step, or save more often, and lower the learning rate or clip gradients"
        )


def _restore(manager: tf.train.CheckpointManager, path: str) -> None:
    if isinstance(manager, CheckpointManager):
        manager.restore(path)
        return
    manager.checkpoint.restore(path)
    if manager.checkpoint_interval is not None:  # the next save is an interval after this one, not after the last
        manager._last_checkpoint_step = int(to_numpy(manager._step_counter))


def _unsound(path: str) -> str:
    """Returns which variable of a checkpoint is not finite, or why it cannot be read; "" if all are finite."""
    try:
        reader = tf.train.load_checkpoint(path)
        for name, dtype in reader.get_variable_to_dtype_map().items():
            if dtype.is_floating and not np.isfinite(reader.get_tensor(name)).all():
                return f"{name.partition('/.ATTRIBUTES')[0]} is not finite"
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
        return f"it cannot be read ({str(error).partition(chr(10))[0]})"
    return ""
