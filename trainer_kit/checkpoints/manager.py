"""The run's checkpoints: saved in the background, the newest ones kept, the newest one restored strictly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state import restore
from trainer_kit.errors import StorageError


class CheckpointManager(tf.train.CheckpointManager):
    """TensorFlow's manager, with asynchronous saves, a strict restore and errors that name the place.

    A save blocks for the copy of the variables only; one save at most is in flight, the next one waits for it.

    Args:
      checkpoint: of `training_checkpoint`.
      directory: where `ckpt-<step>` files go, and come from; on another worker than the chief, they only come from it.
      max_to_keep: how many of the newest stay.
      step_counter: the global step.
      checkpoint_interval: steps between saves.
      init_fn: called when there is no checkpoint to restore.
      asynchronous: whether saves run in the background.
      for_training: whether a restore has to find a place for all that a checkpoint holds, and happens at the start;
        for evaluation neither.
      keeps: False on workers that are not the chief: reading a variable can take all workers, so they save too, but to
        a folder of their own, which goes with the process.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str,
        *,
        max_to_keep: int,
        step_counter: tf.Variable,
        checkpoint_interval: int,
        init_fn: Callable[[], Any] | None = None,
        asynchronous: bool = True,
        for_training: bool = True,
        keeps: bool = True,
    ) -> None:
        self.source = directory
        self._own_folder = None if keeps else tempfile.TemporaryDirectory(prefix="trainer_kit_worker_")
        super().__init__(
            checkpoint,
            self._own_folder.name if self._own_folder else directory,
            max_to_keep=max_to_keep if keeps else 1,
            step_counter=step_counter,
            checkpoint_interval=checkpoint_interval,
            init_fn=init_fn,
        )
        self._in_flight: str | None = None
        self._asynchronous = asynchronous
        self._for_training = for_training

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: tf.train.CheckpointOptions | None = None,
    ) -> str | None:
        """Saves unless it is too early or this step is saved already; returns the prefix, whose files come later.

        Raises:
          StorageError: when this save, or the one before it in the background, cannot be written.
        """
        options = options or tf.train.CheckpointOptions(enable_async=self._asynchronous)
        try:
            path = super().save(checkpoint_number, check_interval=check_interval, options=options)
        except (tf.errors.OpError, OSError) as error:
            raise StorageError(f"no checkpoint can be saved in {self.directory}: {_reason(error)}") from error
        self._in_flight = str(path) if path else self._in_flight
        return str(path) if path else None

    def sync(self) -> None:
        """Waits for the save in flight.

        Raises:
          StorageError: when it failed. TensorFlow itself would say so with the next save only, or never.
        """
        super().sync()
        asked, self._in_flight = self._in_flight, None
        if asked and asked != self.latest_checkpoint:  # which moves when a save is complete
            error = _failure_in_background(self.checkpoint)
            raise StorageError(f"the checkpoint {asked} was not written: {_reason(error)}") from error

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Waits for the save in flight, whatever ended the run; after an error, that one is raised, not its own."""
        if kind is None:
            self.sync()
        else:
            super().sync()

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint and returns its prefix, or calls init_fn; for evaluation does nothing.

        Raises:
          UsageError: when it does not fit the model.
          StorageError: when it is damaged.
        """
        if not self._for_training:
            return None
        newest = self.latest_checkpoint if self._own_folder is None else tf.train.latest_checkpoint(self.source)
        if newest is None:
            return super().restore_or_initialize()
        self.restore(newest)
        return str(newest)

    def restore(self, path: str) -> None:
        """Restores one checkpoint; the next save is an interval after it."""
        restore(self.checkpoint, path, whole=self._for_training)
        self._last_checkpoint_step = int(self._step_counter.numpy())


def _failure_in_background(checkpoint: tf.train.Checkpoint) -> Exception | None:
    """Takes the error of the last asynchronous save from TensorFlow, which would raise it once more at exit."""
    saver = getattr(checkpoint, "_async_checkpointer_impl", None)
    error = getattr(saver, "_async_error", None)
    if saver is not None:
        saver._async_error = None
    return error


def _reason(error: Exception | None) -> str:
    if error is None:
        return "no reason is known; is the disk full?"
    return str(getattr(error, "message", None) or getattr(error, "strerror", None) or error).splitlines()[0]
