"""Finds out whether a failed training step wrote a variable, and what a run loses then. Runs eagerly, on the host."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, TrainerKitError
from trainer_kit.inputs.sources.tfrecords import failed_to_read
from trainer_kit.training.checks.global_step import is_users
from trainer_kit.training.loops.read_before_write import reads_before_writes


def is_between_steps(trainer: Any, error: BaseException) -> bool:
    """Whether the state after `error` in a training loop is that of the last complete step; False if not known.

    That is so when the loop was done; when a batch could not be read, and the step reads it before it writes; and when
    Python failed while a graph was traced.

    Args:
      trainer: The trainer that ran the loop. For a user's own loop the answer is False.
      error: The error that the loop raised.
    """
    if trainer.between_steps:
        return True
    loop, kind = trainer.current_loop, type(trainer)
    if loop is None or is_users(kind, "train") or is_users(kind, "create_train_loop_fn"):
        return False
    cause = error if error.__cause__ is None else error.__cause__
    if isinstance(error, TrainerKitError) and not isinstance(error, DataError) and not isinstance(cause, SystemExit):
        return False
    if not isinstance(cause, tf.errors.OpError):
        return loop.newest_graph is not None
    if not failed_to_read(cause):
        return False
    if loop.newest_graph is not None:
        return reads_before_writes(loop.newest_graph)
    return not is_users(kind, "train_step") and not is_users(kind, "next_train_inputs")


def loss_message(step: int, saved: int, checkpoint: str | None, alone: bool) -> str:
    """Returns the message for a run that failed and could not be saved.

    Args:
      step: The global step.
      saved: The step of the newest checkpoint; negative: there is none.
      checkpoint: The path of the newest checkpoint.
      alone: Whether the run has one worker.
    """
    why = (
        "the training step that failed may have written some of its variables" if alone else "a save needs all workers"
    )
    lost = step - max(saved, 0)
    where = "there is no checkpoint, so the same command starts again from step 0"
    if saved >= 0:
        where = f"the same command resumes from step {saved} ({checkpoint})"
    return f"nothing was saved after the error: {why}; {where}, and {lost} step{' is' if lost == 1 else 's are'} lost"
