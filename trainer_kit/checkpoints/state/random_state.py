"""Random state that neither model.variables nor an optimizer lists.

Without it a resumed run draws other numbers. Keras 3 lists only its own variables, not a
tf.random.Generator or a tf.Variable that a layer creates itself. Keras' global seed generator and
TensorFlow's global generator belong to the process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.runtime.keras_internals import get_global_seed_generator, set_global_seed_generator
from trainer_kit.runtime.tensorflow_internals import get_auto_trackable_class
from trainer_kit.typing import Model

TRACKED_BY_TASKS = (
    tf.Variable,
    tf.Module,
    tf.random.Generator,
    get_auto_trackable_class(),
    keras.Layer,
    keras.random.SeedGenerator,
    list,
    tuple,
    dict,
)


def prepare_process_generators(seed: int) -> dict[str, tf.Variable]:
    """Returns the states of the process's global random generators.

    Keras' generator serves keras.random functions without a seed. TensorFlow's serves the random
    operations of training steps. It is created from `seed` and the seed of tf.random.set_seed
    unless the user has set one. A generator that an earlier run in this process left on the
    replicas of its strategy is replaced. Runs eagerly, in strategy scope.
    """
    keras_generator = get_global_seed_generator()
    if keras_generator is None or _is_of_another_strategy(keras_generator.state.value):
        # The seed comes from Python's generator. Its state is restored, so that the program's next
        # model has the initial weights that it has without a run before it.
        python_state = random.getstate()
        keras_generator = keras.random.SeedGenerator()
        random.setstate(python_state)
        set_global_seed_generator(keras_generator)

    generator = _global_generator()
    if generator is None or _is_of_another_strategy(generator.state):
        process_seed = tf.compat.v1.get_seed(seed)
        generator = tf.random.Generator.from_seed(process_seed)
        tf.random.set_global_generator(generator)

    return {
        "keras": keras_generator.state.value,
        "tensorflow": tf.random.get_global_generator().state,
    }


def _global_generator() -> tf.random.Generator | None:
    """Returns the global generator, or None if TensorFlow had to create a random one."""
    created = []

    def record_variable(create: Callable[..., tf.Variable], **keywords: Any) -> tf.Variable:
        variable = create(**keywords)
        created.append(variable)
        return variable

    try:
        with tf.variable_creator_scope(record_variable):
            generator = tf.random.get_global_generator()
    except RuntimeError:
        # Op determinism is enabled, which forbids random seeds.
        return None
    if created:
        return None
    return generator


def _is_of_another_strategy(variable: tf.Variable) -> bool:
    """Whether a variable lies on the replicas of a strategy that is not the current one.

    The current strategy cannot use such a variable.
    """
    if not isinstance(variable, tf.distribute.DistributedValues):
        return False
    strategy = tf.distribute.get_strategy()
    return not strategy.extended.variable_created_in_scope(variable)


def untracked_model_state(model: Model) -> dict[str, tf.Variable]:
    """Returns the variables, by path, that the section `model` of a checkpoint does not contain.

    For a Keras 3 model these are tf.Variables and tf.random.Generators of its layers. For a
    tf_keras model they are the generators of its layers, which it hides from checkpoints.
    """
    variables = variables_below(model)
    if isinstance(model, keras.Layer):
        tracked_ids = {id(variable.value) for variable in model.variables}
    else:
        view = tf.train.TrackableView(model)
        items = view.descendants()
        tracked_ids = {id(item) for item in items if isinstance(item, tf.Variable)}
        # `_state_var` is the state of a tf.random.Generator.
        variables = {
            path: variable for path, variable in variables.items() if path.endswith("/_state_var")
        }

    untracked = {}
    for path, variable in variables.items():
        if id(variable) not in tracked_ids:
            untracked[path] = variable
    return untracked


def task_state(task: object, model: Model | None = None) -> dict[str, tf.Variable]:
    """Returns the tf.Variables and the random generators of a task, by path.

    Weights of Keras 3 layers are left out, since a task does not train its teacher or its
    augmentation layers.

    Args:
      task: Any object. Its attributes, lists, tuples, dicts, layers and modules are searched.
      model: An object whose contents are left out.
    """
    return variables_below(task, exclude=[model])


def variables_below(
    root: object,
    *,
    exclude: Iterable[object] = (),
    kinds: tuple[type, ...] = TRACKED_BY_TASKS,
    nearest_first: bool = False,
) -> dict[str, tf.Variable]:
    """Returns the variables that attributes, lists, tuples and dicts lead to, by path.

    Each variable is returned once. Attributes of one object are visited in the order of their
    names, public ones first, so that paths do not depend on the order in which a process creates
    objects.

    Args:
      root: The object to start from.
      exclude: Objects to skip, together with what only they lead to.
      kinds: The classes of the objects to visit.
      nearest_first: Whether a variable has its shortest path. Otherwise it has its first path,
        depth first.
    """
    variables: dict[str, tf.Variable] = {}
    # The dict keeps the objects alive, so that no later object has the id of a deleted one.
    visited = {id(item): item for item in exclude}
    waiting = deque([("", root)])
    while waiting:
        if nearest_first:
            path, item = waiting.popleft()
        else:
            path, item = waiting.pop()
        if isinstance(item, keras.random.SeedGenerator):
            item = item.state
        if isinstance(item, keras.Variable):
            item = item.value

        if id(item) in visited:
            continue
        visited[id(item)] = item
        if isinstance(item, tf.Variable):
            variables[path] = item
            continue

        children = []
        for name, child in _children(item, root):
            if isinstance(child, kinds):
                children.append((str(name), child))
        # A stack returns the child that was added last, so the order is reversed there.
        children.sort(
            key=lambda pair: (pair[0].startswith("_"), pair[0]), reverse=not nearest_first
        )
        for name, child in children:
            child_path = f"{path}/{name}".lstrip("/")
            waiting.append((child_path, child))
    return variables


def _children(item: object, root: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(item, (list, tuple)):
        return enumerate(item)
    # Another mapping may read a file for each key, or be a file that is closed.
    if isinstance(item, dict):
        return [(name, child) for name, child in item.items() if isinstance(name, (str, int))]
    # Of these, TensorFlow does not show everything.
    has_hidden_attributes = isinstance(item, (keras.Layer, keras.Metric, tf.Module))
    if has_hidden_attributes or item is root:
        attributes = getattr(item, "__dict__", {})
        return attributes.items()
    children = tf.train.TrackableView.children(item)
    return tuple(children.items())
