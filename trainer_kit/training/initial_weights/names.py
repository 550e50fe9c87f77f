"""Finds the value of each of a model's variables in a file of weights, by names or by the structure of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.variable_names import distinct, layer_names, model_variables
from trainer_kit.checkpoints.weight_files.keras_file import KerasFile
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile, with_ranks
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import check_patterns, native_variable, variable_path
from trainer_kit.training.initial_weights.variable_matching import inner_models, keys_by_structure

Value = TypeVar("Value")


@dataclass(frozen=True)
class NamesInFile:
    """Where a file of weights has the variables of a model.

    Attributes:
      names: A dict from path of the model's variable to name in the file.
      by_rank: The paths of those that were found by the rank of a layer's number, and not by the number itself.
    """

    names: dict[str, str] = field(default_factory=dict)
    by_rank: list[str] = field(default_factory=list)


def weights_by_path(model: Any) -> dict[str, tf.Variable]:
    """Returns the weights of a built model by path, without the states of random generators. Runs eagerly.

    The paths are those that Keras gives, in which all patterns of variables are searched. The second and later
    variables of a path get `#1`, `#2`.
    """
    weights = getattr(model, "weights", None) or model.variables
    return dict(zip(distinct(map(variable_path, weights)), map(native_variable, weights), strict=True))


def names_in_file(
    model: Any, chosen: Mapping[str, tf.Variable], file: WeightFile, new_names: Mapping[str, str] | None
) -> NamesInFile:
    """Returns the names in a file of those chosen weights of a model that the file has, in whatever shape.

    Runs eagerly.

    A checkpoint with a graph of objects is compared by the objects that lead to variables, unless there are
    replacements. All files are compared by names; the first part of the names may differ, if it is the same in all
    names. Ranks in place of the numbers of layers count if they find more variables, and each name that is equal
    without them leads to the same variable; or if the file has ranks itself. They do not count if the file has the
    user's own numbers. The comparison that finds most variables of the right shape counts.

    Args:
      model: A built model.
      chosen: The weights to find, by path.
      file: The file of weights.
      new_names: A dict from new name to name in the file, where names of the file are replaced; None: they are not.
    """

    def fit(found: Mapping[str, str]) -> tuple[int, int, int]:
        of_chosen = _only(chosen, found)
        fitting = sum(file.shapes[found[path]] == tuple(variable.shape) for path, variable in of_chosen.items())
        return fitting, len(of_chosen), len(found)

    theirs = {name: name for name in file.shapes} if new_names is None else new_names
    numbered = isinstance(file, KerasFile) and file.numbered
    ours = [_with_own_numbers(model)] if file.has_own_numbers else list(_names(model, numbered))
    exact = _equal_names(ours, chosen, theirs, fit)
    ranked = _equal_names(list(map(with_ranks, ours)), chosen, with_ranks(theirs), fit)
    checkpoint = file if isinstance(file, TensorFlowFile) and file.has_graph else None
    agree = all(ranked.get(path) == name for path, name in exact.items())
    may_rank = not file.has_own_numbers and (agree or (checkpoint and checkpoint.has_ranks))
    best = max(exact, ranked, key=fit) if may_rank else exact
    if checkpoint and new_names is None:
        keys = keys_by_structure(model, checkpoint.graph, {id(one) for one in chosen.values()})
        name_of = {key: name for name, key in checkpoint.keys.items()}
        by_structure = {path: name_of[keys[id(one)]] for path, one in chosen.items() if keys.get(id(one)) in name_of}
        best = max(by_structure, best, key=fit)
    best = _only(best, chosen)
    by_rank = [path for path, name in best.items() if ranked.get(path) == name and exact.get(path) != name]
    return NamesInFile(best, by_rank)


def replaced_names(file: WeightFile, rename: Iterable[tuple[str, str]], option: str) -> dict[str, str]:
    """Returns a dict from new name to name in a file, after replacements in order.

    Args:
      file: The file of weights.
      rename: Pairs of a regular expression and a replacement.
      option: The flag or the path of the config value that gives them, for messages.

    Raises:
      UsageError: when a pattern matches no name, or two variables get one name.
    """
    names = {name: name for name in file.shapes}
    for pattern, replacement in rename:
        check_patterns(option, [pattern], list(names.values()), of=file.path)
        names = {name: re.sub(pattern, replacement, new) for name, new in names.items()}
    found: dict[str, str] = {}
    for name, new in names.items():
        if new in found:
            raise UsageError(f"{option}: {found[new]} and {name} would both be {new}; change the patterns")
        found[new] = name
    return found


def _names(model: Any, numbered: bool) -> Iterator[dict[str, str]]:
    """Yields each naming that a file may have for the weights of a model: a dict from name to variable path.

    With `numbered`, names with the numbers that Keras 3 writes into weight files are among them.
    """
    weights = weights_by_path(model)
    yield {path: path for path in weights}
    if numbered and isinstance(model, keras.Layer):
        path_of = {id(variable): path for path, variable in weights.items()}
        for item in (model, *inner_models(model)):
            yield {name: path_of[id(one)] for name, one in _numbered_variables(item)}


def _with_own_numbers(model: Any) -> dict[str, str]:
    """Returns the paths of a model's weights by name: the user's numbers of layers, and ranks for those of Keras."""
    paths = {id(variable): path for path, variable in weights_by_path(model).items()}
    own, named = layer_names(model) or {}, model_variables(model)
    if not isinstance(named, dict):
        return {path: path for path in paths.values()}
    pairs = named.items()
    return {own.get(name, name): paths[id(variable)] for name, variable in pairs if id(variable) in paths}


def _only(values: Mapping[str, Value], chosen: Collection[str]) -> dict[str, Value]:
    return {path: value for path, value in values.items() if path in chosen}


def _equal_names(
    ours: Sequence[Mapping[str, str]], chosen: Collection[str], theirs: Mapping[str, str], fit: Callable[[Any], Any]
) -> dict[str, str]:
    """Returns, by path of a weight, the equal name in the file, by the form of the names that fits best.

    The names of the whole model are compared, and those that are chosen alone, which may have a common first part.
    """
    alone = [{name: path for name, path in names.items() if path in chosen} for names in ours]
    forms = [(one, other) for names in [*ours, *alone] for one in _forms(names) for other in _forms(theirs)]
    found = [{path: other[name] for name, path in one.items() if name in other} for one, other in forms]
    return max(found, key=fit, default={})


def _forms(names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields names as they are, without the section of the model, and without their common first part."""
    of_model = [name.removeprefix(MODEL) for name in names]
    yield dict(names)
    yield dict(zip(of_model, names.values(), strict=True))
    inner = [name.partition("/")[2] for name in of_model]
    if len({name.partition("/")[0] for name in of_model}) == 1 and any("/" in name for name in inner):
        yield dict(zip(inner, names.values(), strict=True))  # otherwise the first part is a layer


def _numbered_variables(model: Any) -> Iterator[tuple[str, tf.Variable]]:
    """Yields (names of layers and number, variable), the names that a file of Keras 3 has."""
    waiting, seen = [("", model)], {id(model)}
    while waiting:
        outer, layer = waiting.pop(0)
        inner = [one for one in layers_of(layer) if id(one) not in seen]
        seen |= {id(one) for one in inner}
        below = {id(variable) for one in layers_of(layer) for variable in one.weights}
        own = [variable for variable in layer.weights if id(variable) not in below]
        yield from ((f"{outer}{number}", native_variable(one)) for number, one in enumerate(own))
        waiting += [(f"{outer}{one.name}/", one) for one in inner]


def layers_of(layer: Any) -> list[Any]:
    """Returns the layers that are attributes of a Keras layer, or in lists and dicts that are attributes."""
    return list({id(one): one for one in _layers_in(vars(layer).values())}.values())


def _layers_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, keras.Layer):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _layers_in(value)
        elif isinstance(value, Mapping):
            yield from _layers_in(value.values())
