"""Starting weights from another run's checkpoint."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.selection import newest_checkpoint
from trainer_kit.checkpoints.state import restore
from trainer_kit.checkpoints.variables import model_variables
from trainer_kit.errors import UsageError


def load_initial_weights(model: Any, path: str) -> str:
    """Loads the weights of `model` from a checkpoint, or the newest one of a folder; nothing else of that run.

    Eager, in strategy scope.

    Args:
      model: Keras 3, tf_keras or tf.Module.
      path: a checkpoint's prefix or a folder of checkpoints.

    Returns:
      The prefix of the checkpoint that was loaded.

    Raises:
      UsageError: when there is none, or it lacks a variable of the model or has it in another shape.
    """
    prefix = newest_checkpoint(path) if tf.io.gfile.isdir(path) else path
    if not prefix or not tf.io.gfile.exists(f"{prefix}.index"):
        raise UsageError(
            f"task.init_checkpoint: there is no checkpoint at {path}; give the prefix of one (without .index), "
            "or a folder that holds some"
        )
    items = getattr(model, "checkpoint_items", None) or {}
    restore(tf.train.Checkpoint(model=model_variables(model), **items), prefix, whole=False)
    return str(prefix)
