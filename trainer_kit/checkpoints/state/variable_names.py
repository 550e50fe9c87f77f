"""Stable names for the variables of models and optimizers, as a checkpoint keys them.

TensorFlow's asynchronous save fails at the second save of a tracked Keras 3 object, and
tf.train.Checkpoint(model=...) leaves out Keras 3's seed generators. So the tf.Variables behind
Keras 3's variables are tracked, by name. Keras numbers layers over the life of a process
("dense_7"); here the numbers count within one model, so that names do not depend on earlier models
of the process. The numbers in names that the user gave ("stage_2") become ranks, too; `layer_names`
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

_NAMED_BY_KERAS = (keras.Layer, keras.Metric, keras.Variable, keras.random.SeedGenerator)
_NUMBERED = re.compile(r"^(.*?)(?:_(\d+))?$")


def model_variables(model: Any) -> dict[str, tf.Variable] | Any:
    """Returns the variables of a Keras 3 model by name, seed generators included; any other model unchanged.

    tf_keras models and tf.Module can be tracked directly. Runs eagerly, in cross-replica context.
    """
    if not isinstance(model, keras.Layer):
        return model
    variables = list(model.variables)
    return _map_distinct_names(
        canonical_paths([variable.path for variable in variables]), variables
    )


def layer_names(model: Any) -> dict[str, str] | None:
    """Returns, for names in `model_variables`, the names with the user's own numbers of layers, where the two differ.

    Numbers that Keras gave stay ranks: those after the name of a class. None for a model that is
    not of Keras 3.
    """
    if not isinstance(model, keras.Layer):
        return None
    paths, by_keras = (
        [variable.path for variable in model.variables],
        _class_names(*_NAMED_BY_KERAS),
    )
    own = canonical_paths(paths, lambda stem: stem.replace("_", "") in by_keras)
    names = zip(make_distinct(canonical_paths(paths)), make_distinct(own), strict=True)
    return {rank: name for rank, name in names if rank != name}


def _class_names(*classes: type) -> set[str]:
    """Returns the names of classes and all their subclasses, in lower case."""
    return {
        name
        for one in classes
        for name in (one.__name__.lower(), *_class_names(*one.__subclasses__()))
    }


def item_variables(item: Any) -> Any:
    """Returns an item of `checkpoint_items` with its Keras 3 objects replaced by their tf.Variables, by name.

    Args:
      item: A trackable, or a dict, list or tf.train.Checkpoint of trackables, nested ones included.
    """
    if isinstance(item, keras.Layer):
        return model_variables(item)
    if isinstance(item, (keras.Optimizer, keras.Metric)):
        return _map_distinct_names(
            canonical_paths([variable.path for variable in item.variables]), item.variables
        )
    if isinstance(item, keras.random.SeedGenerator):
        return item.state.value
    if isinstance(item, keras.Variable):
        return item.value
    if isinstance(item, (list, tuple)):
        return [item_variables(one) for one in item]
    if isinstance(item, Mapping):
        return {name: item_variables(one) for name, one in item.items()}
    if type(item) is tf.train.Checkpoint:
        children = {
            name: one
            for name, one in vars(item).items()
            if name != "save_counter" and name[0] != "_"
        }
        found = {name: item_variables(one) for name, one in children.items()}
        return tf.train.Checkpoint(**found)
    return item


def optimizer_variables(
    optimizer: Any, model: Any, trainable: Sequence[Any] = ()
) -> dict[str, tf.Variable] | Any:
    """Returns the variables of a Keras 3 optimizer, slots named after the model's variables; any other unchanged.

    The slots of variables of other models are named after these, below `others`.

    Args:
      optimizer: A built optimizer, or a dict of them by name.
      model: The model whose trainable variables the slots belong to.
      trainable: The variables that count in the names, if some of them were frozen; empty: those of
        the model.
    """
    if isinstance(optimizer, Mapping):
        return {name: optimizer_variables(one, model, trainable) for name, one in optimizer.items()}
    if not isinstance(optimizer, keras.Optimizer):
        return optimizer
    of_model = {id(variable) for variable in [*trainable, *model.variables]}
    others = [
        variable for variable in get_trained_variables(optimizer) if id(variable) not in of_model
    ]
    owners = _owner_names(list(trainable or model.trainable_variables))
    owners += [(flattened, f"others/{name}") for flattened, name in _owner_names(others)]
    owners.sort(key=lambda owner: -len(owner[0]))
    paths = [variable.path for variable in optimizer.variables]
    names = [_slot_name(path, owners) for path in paths]
    # Variables that were frozen have no slots, and still count in the ranks of those that have.
    prefixes = {path.rpartition("/")[0] for path in paths}
    counted = [f"{one}/{name}" for one in prefixes for _, name in owners if trainable]
    return _map_distinct_names(
        canonical_paths([*names, *counted])[: len(names)], optimizer.variables
    )


def canonical_paths(
    paths: Sequence[str], is_ranked: Callable[[str], bool] = lambda stem: True
) -> list[str]:
    """Returns `paths` with the numbers that end their parts replaced by ranks, counted below the same parent.

    `["net_4/dense_8/kernel", "net_4/dense_9/kernel"]` becomes `["net/dense/kernel",
    "net/dense_1/kernel"]`.

    Args:
      paths: The paths.
      is_ranked: Whether the numbers after a word are replaced.
    """
    split = [path.split("/") for path in paths]
    done: list[list[str]] = [[] for _ in paths]
    for depth in range(max(map(len, split), default=0)):
        numbers: dict[tuple[tuple[str, ...], str], set[int]] = defaultdict(set)
        parts = {
            i: _stem_and_number(parts[depth], is_ranked)
            for i, parts in enumerate(split)
            if depth < len(parts)
        }
        for i, (stem, number) in parts.items():
            numbers[tuple(done[i]), stem].add(number)
        parents = {i: tuple(done[i]) for i in parts}
        for i, (stem, number) in parts.items():
            rank = sorted(numbers[parents[i], stem]).index(number)
            done[i].append(f"{stem}_{rank}" if rank else stem)
    return ["/".join(parts) for parts in done]


def _stem_and_number(part: str, is_ranked: Callable[[str], bool]) -> tuple[str, int]:
    match = _NUMBERED.match(part)
    stem, number = match.groups() if match else (part, None)
    return (stem, int(number)) if number and is_ranked(stem) else (part, 0)


def _owner_names(variables: Sequence[Any]) -> list[tuple[str, str]]:
    """Returns (flattened path as in Keras' slot names, our name) of each variable."""
    paths = [getattr(variable, "path", None) or variable.name for variable in variables]
    names = list(_map_distinct_names(canonical_paths(paths), variables))
    flattened = [re.sub(r"[/:]", "_", path) for path in paths]
    return list(zip(flattened, names, strict=True))


def _slot_name(path: str, owners: Iterable[tuple[str, str]]) -> str:
    optimizer, _, slot = path.rpartition(
        "/"
    )  # a LossScaleOptimizer has the names of two optimizers in its paths
    for flattened, name in owners:
        if slot.startswith(flattened + "_"):
            return f"{optimizer}/{name}/{slot[len(flattened) + 1 :]}"
    return path


def make_distinct(names: Iterable[str]) -> list[str]:
    """Returns the names in order; the second and later ones of a name get `#1`, `#2`."""
    seen: dict[str, int] = defaultdict(int)
    made = []
    for name in names:
        made.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return made


def _map_distinct_names(names: Sequence[str], variables: Sequence[Any]) -> dict[str, tf.Variable]:
    """Maps names, each distinct, to tf.Variables."""
    return {
        name: variable.value if isinstance(variable, keras.Variable) else variable
        for name, variable in zip(make_distinct(names), variables, strict=True)
    }
