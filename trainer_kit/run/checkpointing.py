"""Restores and saves the checkpoints of a run, calls the callbacks of a save, and saves after an error."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import (
    DivergedError,
    InterruptedRunError,
    StopTraining,
    StorageError,
    TrainerKitError,
    UsageError,
)
from trainer_kit.errors.user_exits import exits_as_errors
from trainer_kit.run.progress import Phases
from trainer_kit.runtime.collectives import broadcast_from_chief, worker_count
from trainer_kit.training.checks.failed_step import is_between_steps, loss_message
from trainer_kit.training.loops.intervals import is_due

_LOG = logging.getLogger(__name__)


class RunCheckpoints:
    """Saves and restores checkpoints for the controller of a run. All workers call each method together.

    Args:
      manager: The manager of the checkpoints; it knows which step was saved or restored last.
      strategy: The strategy in whose scope checkpoints are restored.
      callbacks: The callbacks of the run.
      phases: The phases of the run.
    """

    def __init__(
        self, manager: CheckpointManager, strategy: tf.distribute.Strategy, callbacks: CallbackList, phases: Phases
    ) -> None:
        self._manager = manager
        self._strategy = strategy
        self._callbacks = callbacks
        self._phases = phases
        self._saving = threading.RLock()  # a late save comes from another thread
        self._last_announced = manager.saved_step

    def is_due(self, begun: int, step: int) -> bool:
        """Whether a checkpoint is due at `step`, at the end of a loop that began at step `begun`; on every worker."""
        interval = self._manager.checkpoint_interval
        return self._manager.time_is_over() if interval is None else is_due(begun, step, interval)

    def restore(self, path: str | None) -> str | None:
        """Restores a checkpoint, or the newest one, or initialises; returns the path of the restored checkpoint."""
        with self._strategy.scope():
            if path is None:
                path = self._manager.restore_or_initialize()
            else:
                self._manager.restore(path)
        self._last_announced = self._manager.saved_step
        return path

    def find_checkpoint(self, step: int, reason: str) -> str:
        """Waits for the save in flight and returns the path of a step's checkpoint; the chief decides if it exists.

        Args:
          step: The step to rewind to.
          reason: Why the run rewinds, for the message.

        Raises:
          UsageError: when that step has no checkpoint.
        """
        self.sync()
        source = self._manager.source
        is_there = int(step in complete_checkpoints(source))
        if not broadcast_from_chief(self._strategy, is_there):
            raise UsageError(
                f"the run cannot go back to step {step} ({reason}): {source} holds no checkpoint of that step; request "
                "a step that has a checkpoint"
            )
        return os.path.join(source, f"ckpt-{step}")

    def save(self, step: int, again: bool = False) -> None:
        """Saves the state of a step, unless it is saved already and not to be saved again."""
        with self._saving:
            if step == self._manager.saved_step and not again:
                return
            self.sync()
            if again:
                self._manager.forget_saved_step()
            self._callbacks.call("checkpoint_begin")
            with self._phases.during("save"):
                self._manager.save(checkpoint_number=step, check_interval=False)

    def sync(self) -> None:
        """Waits for the save in flight, and calls checkpoint_saved for it.

        Raises:
          StorageError: when that save failed.
        """
        manager = self._manager
        with self._saving:
            with self._phases.during("save"):
                manager.sync()
            if self._last_announced != manager.saved_step:
                self._last_announced = manager.saved_step
                self._callbacks.call("checkpoint_saved", manager.saved_path, manager.saved_step)


@contextlib.contextmanager
def save_after_errors(controller: Any) -> Iterator[None]:
    """Saves the state after an error or the user's sys.exit, if it is sound; then raises the error again.

    Raises:
      InterruptedRunError: instead of a KeyboardInterrupt that the user's code raised.
      TrainerKitError: when code other than a callback or an action raised StopTraining.
    """
    try:
        with exits_as_errors():
            yield
    except StopTraining as stop:
        raise TrainerKitError(
            f"StopTraining ({stop}) was raised in the middle of a loop or an evaluation; raise it in a callback, or in "
            "train_actions or eval_actions, which run after a loop or an evaluation"
        ) from stop
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (DivergedError, StorageError)):
            try:
                _save_if_finite(controller, error, alone=worker_count(controller.strategy) == 1)
            except Exception as second:
                _LOG.warning("nothing could be saved after the error: %s", second)
        if isinstance(error, Exception):
            raise
        raise InterruptedRunError(f"your code raised KeyboardInterrupt at step {controller.run.step}") from error


def _save_if_finite(controller: Any, error: BaseException, alone: bool) -> None:
    """Saves after an error if the state is that of a step's end and the weights are finite.

    After an error inside a step it saves only if that step has written no variable. Otherwise it logs the checkpoint
    that the run resumes from, and how many steps are lost.

    Args:
      controller: The controller of the run; with a caller's orbit.Controller nothing is saved.
      error: The error that ends the run.
      alone: Whether the run has a single worker. Several workers can save only together, and the others may be gone.
    """
    trainer = controller.trainer
    manager = controller.checkpoint_manager
    step = controller.run.step
    if not controller.saves_after_errors or trainer is None or trainer.weights_finite is False:
        return
    if step <= max(manager.saved_step, 0):
        return
    begin, end = controller.running
    if controller.phase == "train" or not alone:
        if not alone or not begin <= step <= end or not is_between_steps(trainer, error):
            if alone:
                controller.sync()
            _LOG.warning("%s", loss_message(step, manager.saved_step, manager.saved_path, alone))
            return
        if begin < step < end:
            controller.interrupt_loop()
        trainer.weights_finite = None
    controller.save_checkpoint()
    controller.sync()
    _LOG.info("saved step %d after the error; the same command resumes from there", step)
