"""The structure of a Keras 3 model as a checkpoint shows it: what `tf.train.Checkpoint(model=model)` would write.

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

_Node = get_auto_trackable_class()
_LOG = logging.getLogger(__name__)


def build_model_trackable(model: Any) -> Any:
    """Returns the trackable to save for a built `model`: its variables by our names and, for Keras 3, by structure too.

    Runs eagerly, in cross-replica context. The structure is a copy made of plain nodes: a Keras 3
    object in it would be a second owner of the same variable, and the file would hold each value
    twice. A warning names the variables that `tf.train.Checkpoint(model=model)` cannot load.

    Args:
      model: A Keras 3 model, tf_keras model or tf.Module. The latter two are returned unchanged,
        since TensorFlow saves them by structure anyway.
    """
    named = model_variables(model)
    if not isinstance(model, keras.Layer):
        return named
    structure = _copy_structure(model, {})
    children = tf.train.TrackableView.children(structure)
    if clashes := sorted(
        name for name in children.keys() & named.keys() if children[name] is not named[name]
    ):
        _LOG.warning(
            "%s",
            _format_load_warning(
                model, f"{clashes[0]} is the name of a variable and of another attribute"
            ),
        )
        return named
    reached = {id(item) for item in tf.train.TrackableView(structure).descendants()}
    wanted = {
        id(variable.value) for variable in model.weights
    } - reached  # without the states of random generators
    if unseen := [name for name, variable in named.items() if id(variable) in wanted]:
        reason = (
            f"it does not see {unseen[0]}{f' and {len(unseen) - 1} more' if unseen[1:] else ''};"
            " Keras 3 hides "
        )
        _LOG.warning(
            "%s",
            _format_load_warning(
                model, f"{reason}layers in lists and dicts from it, so assign each to an attribute"
            ),
        )
    root = _Node()
    for name, variable in {
        **named,
        **children,
    }.items():  # the first path to a variable is its key in the file
        setattr(root, name, variable)
    return root


def _format_load_warning(model: Any, reason: str) -> str:
    return (
        f"best weights: tf.train.Checkpoint(model=...) cannot load all of the model {model.name}:"
        f" {reason}; trainer_kit.load_weights and trainer_kit.load_model load it"
    )


def _copy_structure(item: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a plain node for a layer or container, the tf.Variable of a Keras variable, and other items unchanged.

    Args:
      item: An object that a checkpoint of the model would track.
      copies: A dict from id to (original, its node), for objects that several paths lead to.
    """
    if isinstance(item, keras.Variable):
        return item.value
    if not isinstance(item, (keras.Layer, list, tuple, Mapping)):
        return item
    if id(item) not in copies:
        node = _Node()
        copies[id(item)] = (item, node)
        for name, child in tf.train.TrackableView.children(item).items():
            setattr(node, name, _copy_structure(child, copies))
    return copies[id(item)][1]
