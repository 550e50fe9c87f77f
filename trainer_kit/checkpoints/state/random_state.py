"""State that neither model.variables nor an optimizer shows, and without which a resumed run draws other numbers.

Keras 3 lists its own variables only: a tf.random.Generator or a tf.Variable that a layer made by itself is not among
them. Keras' global seed generator and TensorFlow's global generator belong to the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.distribution.keras_internals import global_seed_generator, set_global_seed_generator
from trainer_kit.distribution.tensorflow_internals import plain_node_class

_KINDS = (
    *(tf.Variable, tf.Module, tf.random.Generator, plain_node_class()),
    *(keras.Layer, keras.random.SeedGenerator, list, tuple, dict),
)


def process_generators(seed: int) -> dict[str, tf.Variable]:
    """Returns the states of the process' own random generators; eager, in strategy scope.

    Keras' serves keras.random functions without a seed; TensorFlow's is made from `seed` unless the user has set one.
    One that an earlier run in this process has left on the replicas of its own strategy is replaced.
    """
    keras_generator = global_seed_generator()
    if keras_generator is None or _is_of_another_strategy(keras_generator.state.value):
        keras_generator = keras.random.SeedGenerator()
        set_global_seed_generator(keras_generator)
    generator = _global_generator()
    if generator is None or _is_of_another_strategy(generator.state):
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
    return {"keras": keras_generator.state.value, "tensorflow": tf.random.get_global_generator().state}


def _global_generator() -> tf.random.Generator | None:
    """Returns the global generator that is set; None if there was none, or TensorFlow has just made a random one."""
    made = []

    def note(create: Callable[..., tf.Variable], **keywords: Any) -> tf.Variable:
        made.append(create(**keywords))
        return made[-1]

    try:
        with tf.variable_creator_scope(note):
            generator = tf.random.get_global_generator()
    except RuntimeError:  # op determinism is enabled, which forbids random seeds
        return None
    return None if made else generator


def _is_of_another_strategy(variable: Any) -> bool:
    """Whether a variable lies on the replicas of a strategy that is not the current one, which cannot use it."""
    mirrored = isinstance(variable, tf.distribute.DistributedValues)
    return mirrored and not tf.distribute.get_strategy().extended.variable_created_in_scope(variable)


def untracked_model_state(model: Any) -> dict[str, tf.Variable]:
    """Returns the state of `model` that its own part of a checkpoint does not hold, by the path that leads to it.

    That is, of a Keras 3 model, tf.Variables and tf.random.Generators of its layers; of a tf_keras model the generators
    of its layers, which it hides from checkpoints.
    """
    found = _below(model)
    if isinstance(model, keras.Layer):
        known = {id(variable.value) for variable in model.variables}
    else:
        known = {id(item) for item in tf.train.TrackableView(model).descendants() if isinstance(item, tf.Variable)}
        found = {path: variable for path, variable in found.items() if path.endswith("/_state_var")}
    return {path: variable for path, variable in found.items() if id(variable) not in known}


def task_state(task: Any, model: Any = None) -> dict[str, tf.Variable]:
    """Returns the tf.Variables and the states of random generators of a task, by the path that leads to them.

    Of Keras 3 layers the weights do not count: what a task teaches with, or augments with, it does not train.

    Args:
      task: any object; it is looked for in attributes, lists, tuples and dicts, layers and modules.
      model: what is reached through it alone is left out.
    """
    return _below(task, apart_from=model)


def _below(root: Any, apart_from: Any = None) -> dict[str, tf.Variable]:
    """Variables by path, each once, by the first of its paths; depth first, attributes of one object by name."""
    found: dict[str, tf.Variable] = {}
    seen, waiting = {id(apart_from)}, [("", root)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, keras.random.SeedGenerator):
            item = item.state.value
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tf.Variable):
            found[path] = item
            continue
        children = [(str(name), child) for name, child in _children(item, root) if isinstance(child, _KINDS)]
        children.sort(key=lambda pair: (pair[0].startswith("_"), pair[0]), reverse=True)
        waiting += [(f"{path}/{name}".lstrip("/"), child) for name, child in children]
    return found


def _children(item: Any, root: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(item, (list, tuple)):
        return enumerate(item)
    if isinstance(item, dict):  # another mapping may read a file for each key, or be a file that is closed
        return [(name, child) for name, child in item.items() if isinstance(name, (str, int))]
    if isinstance(item, (keras.Layer, tf.Module)) or item is root:  # of these, TensorFlow does not show everything
        return getattr(item, "__dict__", {}).items()
    return tuple(tf.train.TrackableView.children(item).items())
