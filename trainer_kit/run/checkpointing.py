"""RunCheckpoints: restores and saves the checkpoints of a run, and calls the callbacks of a save."""

from __future__ import annotations

import os
import threading

import tensorflow as tf

from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.distribution.collectives import broadcast_from_chief
from trainer_kit.errors import UsageError
from trainer_kit.run.progress import Phases
from trainer_kit.training.loops.intervals import is_due


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
        self._manager, self._strategy, self._callbacks, self._phases = manager, strategy, callbacks, phases
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

    def path_of(self, step: int, reason: str) -> str:
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
