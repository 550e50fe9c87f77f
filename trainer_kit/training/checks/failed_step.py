"""Whether a training step that failed has written a variable, and what a run loses if so. Eager, on the host."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, TrainerKitError
from trainer_kit.inputs.sources.tfrecords import failed_to_read
from trainer_kit.training.checks.global_step import is_users
from trainer_kit.training.loops.read_before_write import reads_before_writes


def is_between_steps(trainer: Any, error: Exception) -> bool:
    """Whether the state is that of the last complete step after `error` in a training loop; False if not known.

    It is when the loop was done, when a batch could not be read that the step reads before it writes, and when Python
    failed while a graph was made.

    Args:
      trainer: that ran the loop. Of one with a loop of its own nothing is known.
      error: that the loop has raised.
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
    """Returns what to say of a run that failed and could not be saved.

    Args:
      step: the global step.
      saved: the step of the newest checkpoint; negative: there is none.
      checkpoint: its path.
      alone: whether the run has one worker.
    """
    why = (
        "the training step that failed may have written some of its variables" if alone else "a save needs all workers"
    )
    lost = step - max(saved, 0)
    where = "there is no checkpoint, so the same command starts again from step 0"
    if saved >= 0:
        where = f"the same command resumes from step {saved} ({checkpoint})"
    return f"nothing was saved after the error: {why}; {where}, and {lost} step{' is' if lost == 1 else 's are'} lost"
