"""Starting weights from another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.strict_restore import restore, saved_shapes, wanted_shapes
from trainer_kit.checkpoints.state.variable_names import item_variables, model_variables
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import checkpoint_of_folder


def load_initial_weights(model: Any, path: str) -> str:
    """Loads the weights of `model` from a checkpoint, or the newest one of a folder; nothing else of that run.

    Eager, in strategy scope.

    Args:
      model: Keras 3, tf_keras or tf.Module.
      path: a checkpoint's prefix, or a folder of checkpoints: of best weights the best is taken, else the newest.

    Returns:
      The prefix of the checkpoint that was loaded.

    Raises:
      UsageError: when there is none, or it lacks a variable of the model or has it in another shape.
    """
    prefix = checkpoint_of_folder(path) if tf.io.gfile.isdir(path) else path
    if not prefix or not tf.io.gfile.exists(f"{prefix}.index"):
        raise UsageError(
            f"task.init_checkpoint: there is no checkpoint at {path}; give the prefix of a checkpoint (without "
            ".index), or a folder that holds checkpoints"
        )
    saved = saved_shapes(str(prefix), all_names=True)
    items = {
        name: _as_saved(name, item, saved) for name, item in (getattr(model, "checkpoint_items", None) or {}).items()
    }
    advice = (
        f"task.init_checkpoint: {prefix} does not hold all weights of this model; give a checkpoint of the same model, "
        "or build the model as that run built it. To take a part of the weights (an encoder's, for example), override "
        "initialize() of the task and load that part into model (--allow_partial_restore is only for the checkpoints "
        "of this run)"
    )
    restore(tf.train.Checkpoint(model=model_variables(model), **items), prefix, whole=False, advice=advice)
    return str(prefix)


def _as_saved(name: str, item: Any, saved: Mapping[str, Any]) -> Any:
    """Returns an item of the model's by the names of its variables, or as it is if no such name was saved.

    Earlier versions, and other programs, have saved Keras 3 objects as TensorFlow tracks them.
    """
    named = item_variables(item)
    wanted = wanted_shapes({name: named})
    return item if wanted and not wanted.keys() & saved.keys() else named
