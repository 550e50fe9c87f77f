"""The structure of a Keras 3 model, as `tf.train.Checkpoint(model=model)` would write it.

TensorFlow finds a variable in a checkpoint by the names of the attributes that lead to it, such as
`_functional/_operations/1/_kernel`. A program that uses only TensorFlow does not know our names,
such as `sequential/dense/kernel`. So the best weights are written with both: each variable is in
the file once, and two paths lead to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.variable_names import model_variables
from trainer_kit.runtime.tensorflow_internals import get_auto_trackable_class
from trainer_kit.typing import Model

_Node = get_auto_trackable_class()
_LOG = logging.getLogger(__name__)


def build_model_trackable(model: Model) -> Any:
    """Returns the trackable to save for a built `model`.

    It contains the variables by our names and, for Keras 3, by structure too. The structure is a
    copy made of plain nodes, since a Keras 3 object in it would be a second owner of the same
    variable, and the file would contain each value twice. A warning names the variables that
    `tf.train.Checkpoint(model=model)` cannot load. Runs eagerly, in cross-replica context.

    Args:
      model: A Keras 3 model, tf_keras model or tf.Module. The latter two are returned unchanged,
        since TensorFlow saves them by structure anyway.
    """
    named = model_variables(model)
    if not isinstance(model, keras.Layer):
        return named

    structure = _copy_structure(model, {})
    children = tf.train.TrackableView.children(structure)
    shared_names = children.keys() & named.keys()
    conflicts = [name for name in shared_names if children[name] is not named[name]]
    if conflicts:
        reason = f"{min(conflicts)} is the name of a variable and of another attribute"
        warning = _format_load_warning(model, reason)
        _LOG.warning("%s", warning)
        return named

    # `model.weights` leaves out the states of random generators.
    reached_items = tf.train.TrackableView(structure).descendants()
    reached_ids = {id(item) for item in reached_items}
    weight_ids = {id(variable.value) for variable in model.weights}
    hidden_ids = weight_ids - reached_ids
    hidden_names = [name for name, variable in named.items() if id(variable) in hidden_ids]
    if hidden_names:
        more_count = len(hidden_names) - 1
        more = f" and {more_count} more" if more_count else ""
        reason = (
            f"it does not see {hidden_names[0]}{more}; "
            "Keras 3 hides layers in lists and dicts from it, so assign each to an attribute"
        )
        warning = _format_load_warning(model, reason)
        _LOG.warning("%s", warning)

    # The first path to a variable is its key in the file, so our names come first.
    root = _Node()
    entries = {**named, **children}
    for name, item in entries.items():
        setattr(root, name, item)
    return root


def _format_load_warning(model: Model, reason: str) -> str:
    return (
        "best weights: tf.train.Checkpoint(model=...) cannot load all of "
        f"the model {model.name}: {reason}; "
        "trainer_kit.load_weights and trainer_kit.load_model load it"
    )


def _copy_structure(item: object, copies: dict[int, tuple[object, object]]) -> Any:
    """Returns a plain node for a layer or container, with copies of its children.

    It returns the tf.Variable of a Keras variable, and other items unchanged.

    Args:
      item: An object that a checkpoint of the model would track.
      copies: A dict from id to (original, its node), for objects that several paths lead to.
    """
    if isinstance(item, keras.Variable):
        return item.value
    if not isinstance(item, (keras.Layer, list, tuple, Mapping)):
        return item
    identity = id(item)
    if identity not in copies:
        node = _Node()
        # A path below the item may lead back to it.
        copies[identity] = (item, node)
        children = tf.train.TrackableView.children(item)
        for name, child in children.items():
            child_copy = _copy_structure(child, copies)
            setattr(node, name, child_copy)
    _, item_copy = copies[identity]
    return item_copy
