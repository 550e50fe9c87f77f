"""Loads initial weights from another run's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.strict_restore import restore, saved_shapes, wanted_shapes
from trainer_kit.checkpoints.state.variable_names import item_variables, model_variables
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import checkpoint_of_folder


def load_initial_weights(model: Any, path: str) -> str:
    """Loads only the weights of `model` from a checkpoint or a folder of checkpoints. Eager, in strategy scope.

    Args:
      model: A model of Keras 3 or tf_keras, or a tf.Module.
      path: The prefix of a checkpoint, or a folder: of a folder of best weights the best is loaded, else the newest.

    Returns:
      The prefix of the checkpoint that was loaded.

    Raises:
      UsageError: when there is no checkpoint, or it lacks a variable of the model or has another shape for it.
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
    """Returns the variables of an item by name, or the item itself if none of these names was saved.

    Earlier versions and other programs saved Keras 3 objects as TensorFlow tracks them.
    """
    named = item_variables(item)
    wanted = wanted_shapes({name: named})
    return item if wanted and not wanted.keys() & saved.keys() else named
