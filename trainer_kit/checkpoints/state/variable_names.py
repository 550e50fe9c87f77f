"""Stable names for the variables of models and optimizers, as a checkpoint keys them.

TensorFlow's asynchronous save fails at the second save of a tracked Keras 3 object, and
tf.train.Checkpoint(model=...) leaves out Keras 3's seed generators. So the tf.Variables behind
Keras 3's variables are tracked, by name. Keras numbers layers over the life of a process
("dense_7"). Here the numbers count within one model, so that names do not depend on earlier models
of the process. The numbers in names that the user gave ("stage_2") become ranks, too. `layer_names`
has them, for comparisons with other models.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.runtime.keras_internals import get_trained_variables
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.typing import Model, Optimizers, Variable

_NAMED_BY_KERAS = (keras.Layer, keras.Metric, keras.Variable, keras.random.SeedGenerator)
_NUMBERED = re.compile(r"^(.*?)(?:_(\d+))?$")


def model_variables(model: Model) -> dict[str, tf.Variable] | Any:
    """Returns the variables of a Keras 3 model by name, seed generators included.

    Any other model is returned unchanged, since tf_keras models and tf.Module can be tracked
    directly. Runs eagerly, in cross-replica context.
    """
    if not isinstance(model, keras.Layer):
        return model
    variables = list(model.variables)
    paths = [variable.path for variable in variables]
    names = canonical_paths(paths)
    return _map_distinct_names(names, variables)


def layer_names(model: Model) -> dict[str, str] | None:
    """Returns the names in `model_variables` with the user's own numbers of layers.

    Numbers that Keras gave stay ranks. They follow the name of a class.

    Returns:
      A dict from a name in `model_variables` to the name with the user's numbers, where the two
      differ. None for a model that is not of Keras 3.
    """
    if not isinstance(model, keras.Layer):
        return None

    paths = [variable.path for variable in model.variables]
    class_names = _class_names(*_NAMED_BY_KERAS)

    def is_named_by_keras(stem: str) -> bool:
        # Keras derives the name of a layer without one from its class, `dense_7` from Dense.
        class_name = stem.replace("_", "")
        return class_name in class_names

    ranked_paths = canonical_paths(paths)
    user_paths = canonical_paths(paths, is_named_by_keras)
    ranked_names = make_distinct(ranked_paths)
    user_names = make_distinct(user_paths)

    names = {}
    for ranked_name, user_name in zip(ranked_names, user_names, strict=True):
        if ranked_name != user_name:
            names[ranked_name] = user_name
    return names


def _class_names(*classes: type) -> set[str]:
    """Returns the names of classes and all their subclasses, in lower case."""
    names = set()
    for kind in classes:
        names.add(kind.__name__.lower())
        names |= _class_names(*kind.__subclasses__())
    return names


def item_variables(item: object) -> Any:
    """Returns an item of `checkpoint_items` without Keras 3 objects.

    They are replaced by their tf.Variables, by name.

    Args:
      item: A trackable, or a dict, list or tf.train.Checkpoint of trackables, nested ones included.
    """
    if isinstance(item, keras.Layer):
        return model_variables(item)
    if isinstance(item, (keras.Optimizer, keras.Metric)):
        paths = [variable.path for variable in item.variables]
        names = canonical_paths(paths)
        return _map_distinct_names(names, item.variables)
    if isinstance(item, keras.random.SeedGenerator):
        return item.state.value
    if isinstance(item, keras.Variable):
        return item.value
    if isinstance(item, (list, tuple)):
        return [item_variables(child) for child in item]
    if isinstance(item, Mapping):
        return {name: item_variables(child) for name, child in item.items()}
    if type(item) is tf.train.Checkpoint:
        children = {}
        for name, child in vars(item).items():
            if name != "save_counter" and name[0] != "_":
                children[name] = item_variables(child)
        return tf.train.Checkpoint(**children)
    return item


def optimizer_variables(
    optimizer: Optimizers,
    model: Model,
    trainable: Sequence[Variable] = (),
) -> dict[str, tf.Variable] | Any:
    """Returns the variables of a Keras 3 optimizer, with slots named after the model's variables.

    Any other optimizer is returned unchanged. The slots of variables of other models are named
    after these variables, below `others`.

    Args:
      optimizer: A built optimizer, or a dict of them by name.
      model: The model whose trainable variables the slots belong to.
      trainable: The variables that count in the names, if some of them were frozen. Empty means
        those of the model.
    """
    if isinstance(optimizer, Mapping):
        return {
            name: optimizer_variables(child, model, trainable) for name, child in optimizer.items()
        }
    if not isinstance(optimizer, keras.Optimizer):
        return optimizer

    own_variables = [*trainable, *model.variables]
    own_ids = {id(variable) for variable in own_variables}
    trained_variables = get_trained_variables(optimizer)
    other_variables = [variable for variable in trained_variables if id(variable) not in own_ids]

    owner_variables = list(trainable or model.trainable_variables)
    owners = _owner_names(owner_variables)
    for flattened, name in _owner_names(other_variables):
        owners.append((flattened, f"others/{name}"))
    # Longer paths come first, since a path may begin with another one.
    owners.sort(key=lambda owner: -len(owner[0]))

    paths = [variable.path for variable in optimizer.variables]
    names = [_slot_name(path, owners) for path in paths]
    # Variables that were frozen have no slots, and still count in the ranks of those that have.
    counted_names = []
    if trainable:
        prefixes = {path.rpartition("/")[0] for path in paths}
        for prefix in prefixes:
            for _, name in owners:
                counted_names.append(f"{prefix}/{name}")

    canonical_names = canonical_paths([*names, *counted_names])
    slot_names = canonical_names[: len(names)]
    return _map_distinct_names(slot_names, optimizer.variables)


def canonical_paths(
    paths: Sequence[str], is_ranked: Callable[[str], bool] = lambda stem: True
) -> list[str]:
    """Returns `paths` with the numbers that end their parts replaced by ranks.

    The ranks are counted below the same parent. `["net_4/dense_8/kernel", "net_4/dense_9/kernel"]`
    becomes `["net/dense/kernel", "net/dense_1/kernel"]`.

    Args:
      paths: The paths.
      is_ranked: Whether the numbers after a word are replaced.
    """
    split_paths = [path.split("/") for path in paths]
    ranked_paths: list[list[str]] = [[] for _ in paths]
    depths = [len(path) for path in split_paths]
    max_depth = max(depths, default=0)
    for depth in range(max_depth):
        # The parent, the stem and the number of the part at this depth, by the path's index
        parts: dict[int, tuple[tuple[str, ...], str, int]] = {}
        for index, path in enumerate(split_paths):
            if depth >= len(path):
                continue
            stem = path[depth]
            number = 0
            match = _NUMBERED.match(stem)
            if match and match[2] and is_ranked(match[1]):
                stem = match[1]
                number = int(match[2])
            parent = tuple(ranked_paths[index])
            parts[index] = (parent, stem, number)

        numbers: dict[tuple[tuple[str, ...], str], set[int]] = defaultdict(set)
        for parent, stem, number in parts.values():
            numbers[parent, stem].add(number)

        for index, (parent, stem, number) in parts.items():
            sibling_numbers = sorted(numbers[parent, stem])
            rank = sibling_numbers.index(number)
            ranked_part = f"{stem}_{rank}" if rank else stem
            ranked_paths[index].append(ranked_part)

    return ["/".join(ranked_path) for ranked_path in ranked_paths]


def _owner_names(variables: Sequence[Variable]) -> list[tuple[str, str]]:
    """Returns (flattened path as in Keras' slot names, our name) of each variable."""
    # A tf.Variable has only a name.
    paths = [getattr(variable, "path", None) or variable.name for variable in variables]
    names = make_distinct(canonical_paths(paths))
    owners = []
    for path, name in zip(paths, names, strict=True):
        flattened = re.sub(r"[/:]", "_", path)
        owners.append((flattened, name))
    return owners


def _slot_name(path: str, owners: Iterable[tuple[str, str]]) -> str:
    # A LossScaleOptimizer has the names of two optimizers in its paths.
    optimizer, _, slot = path.rpartition("/")
    for flattened, name in owners:
        prefix = f"{flattened}_"
        if slot.startswith(prefix):
            slot_name = slot.removeprefix(prefix)
            return f"{optimizer}/{name}/{slot_name}"
    return path


def make_distinct(names: Iterable[str]) -> list[str]:
    """Returns the names in order, where the second and later ones of a name get `#1`, `#2`."""
    counts: dict[str, int] = defaultdict(int)
    distinct_names = []
    for name in names:
        count = counts[name]
        distinct_name = f"{name}#{count}" if count else name
        distinct_names.append(distinct_name)
        counts[name] += 1
    return distinct_names


def _map_distinct_names(
    names: Sequence[str], variables: Sequence[Variable]
) -> dict[str, tf.Variable]:
    """Maps names, each distinct, to tf.Variables."""
    distinct_names = make_distinct(names)
    native_variables = [native_variable(variable) for variable in variables]
    return dict(zip(distinct_names, native_variables, strict=True))
