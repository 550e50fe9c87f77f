"""State that neither model.variables nor an optimizer shows, and without which a resumed run draws other numbers.

Keras 3 lists its own variables only: a tf.random.Generator or a tf.Variable that a layer made by itself is not among
them. Keras' global seed generator and TensorFlow's global generator belong to the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.python.ops import stateful_random_ops


def process_generators(seed: int) -> dict[str, tf.Variable]:
    """Returns the states of the process' own random generators; eager, in strategy scope.

    Keras' serves keras.random functions without a seed; TensorFlow's is made from `seed` unless the user has set one.
    """
    if global_state.get_global_attribute("global_seed_generator") is None:
        global_seed_generator()
    if stateful_random_ops.global_generator is None:  # TensorFlow would make one of its own from the machine's noise
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
    return {"keras": global_seed_generator().state.value, "tensorflow": tf.random.get_global_generator().state}


def untracked_state(root: Any) -> dict[str, tf.Variable]:
    """Returns the tf.Variables below `root`, those of tf.random.Generators included, that are no Keras variables.

    Args:
      root: a Keras 3 model, or any object; of the latter the attributes that TensorFlow can track are looked at.

    Returns:
      Variables by the path of attributes that leads to them.
    """
    if isinstance(root, keras.Layer):
        known = {id(variable.value) for variable in root.variables}
        found = _below(root)
    else:
        known = set()
        kinds = (tf.Variable, tf.Module, tf.random.Generator)
        attributes = {name: value for name, value in vars(root).items() if isinstance(value, kinds)}
        found = _below(tf.train.Checkpoint(**attributes))
    unique: dict[int, tuple[str, tf.Variable]] = {}
    for path, variable in found:
        if id(variable) not in known:
            unique.setdefault(id(variable), (path, variable))
    return dict(unique.values())


def _below(root: Any) -> Iterator[tuple[str, tf.Variable]]:
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, item = waiting.pop()
        if id(item) in seen or isinstance(item, (keras.Variable, keras.Optimizer, keras.metrics.Metric)):
            continue
        seen.add(id(item))
        if isinstance(item, tf.Variable):
            yield path, item
            continue
        children = tf.train.TrackableView.children(item)
        waiting += sorted(((f"{path}/{name}".lstrip("/"), child) for name, child in children.items()), reverse=True)
