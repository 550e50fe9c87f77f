"""Matches the values of a checkpoint of any program to the variables of a model.

In a checkpoint, names of attributes lead to values. A model has several sets of names: those that trainer_kit gives
variables, those that TensorFlow finds in the objects, and those that Keras 2 wrote. Each set is tried on each object of
the checkpoint that may be the model, and the best match is used.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import ROOT, CheckpointGraph
from trainer_kit.checkpoints.state.variable_names import layer_names, model_variables
from trainer_kit.config.schema.optimization import AVERAGE, WEIGHTS, EMAConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.optimizers.moving_average import average_keys, averaged_variables
from trainer_kit.optimizers.per_variable import native_variable, variable_path
from trainer_kit.process.run_directory import read_layer_names

_DEPTH = 3  # attributes between the root and the model
Children = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Match:
    """The match between one object of a checkpoint and a model.

    Attributes:
      part: The attributes that lead to the object; "" is the root.
      node: The object's node.
      pairs: (variable, key of its value) for each variable with a value of its shape.
      misfits: (name, what is wrong, shape in the file, shape here) of the variables without a value.
      reshaped: (variable, key of its value) for each variable with a value of another shape.
      averaged: Whether the values are moving averages, as far as there are any.
    """

    part: str
    node: int
    pairs: list[tuple[tf.Variable, str]]
    misfits: list[tuple[str, str, Any, Any]]
    reshaped: list[tuple[tf.Variable, str]]
    averaged: bool = False


def match(model: Any, graph: CheckpointGraph, part: str | None = None, averaged: bool | str = True) -> Match:
    """Returns the match that leaves the fewest variables without a value.

    Args:
      model: The built model.
      graph: The graph of the checkpoint.
      part: The attributes that lead to the model in the checkpoint, such as "net"; None searches for it.
      averaged: Whether to use the moving averages of a run instead of its weights, if there are any; or the name of
        one of several averages.

    Raises:
      UsageError: when there is no such part or average, or several parts fit.
    """
    nodes = graph.nodes(_DEPTH)
    if part is not None:
        if part not in nodes:
            raise UsageError(
                f"part: {graph.prefix} has no {part!r}; {suggestion(part, [name for name in nodes if name])}"
            )
        nodes = {part: nodes[part]}
    views = _views(model, graph)
    found = [_match(model, graph, name, node, view) for name, node in nodes.items() for view in views]
    best = min(found, key=_distance)
    whole = {one.node: one.part or "the root" for one in found if not one.misfits}
    if part is None and not best.misfits and best.part != "model" and len(whole) > 1:
        raise UsageError(
            f"{graph.prefix} has several parts that fit: {', '.join(sorted(whole.values()))}; give one of them as part="
        )
    if isinstance(averaged, str):
        return best if averaged == WEIGHTS else _with_averages(model, graph, best, _named_averages(graph, averaged))
    averages = graph.children(graph.children(ROOT).get(AVERAGE)) if averaged and best.part == "model" else {}
    return _with_averages(model, graph, best, averages) if averages else best


def inner_models(model: Any) -> list[Any]:
    """Returns the Keras models that are layers of a model, such as a backbone that was made on its own."""
    return [one for one in getattr(model, "layers", ()) if isinstance(one, keras.Model)]


def keys_by_structure(model: Any, graph: CheckpointGraph, wanted: Collection[int]) -> dict[int, str]:
    """Returns id(tf.Variable) -> key of its value, by the objects of a checkpoint and of a model that fit best.

    The checkpoint may hold a part of the model, such as a Keras model inside of it, and values of other shapes.

    Args:
      model: A built model.
      graph: The graph of the checkpoint.
      wanted: id(tf.Variable) of the variables to find; the objects that have most of them fit best.
    """
    items = [model, *inner_models(model)]
    found = [
        _match(item, graph, name, node, view)
        for item in items
        for view in _views(item, graph)
        for name, node in graph.nodes(_DEPTH).items()
        if {key.lstrip("_") for key in graph.children(node)} & {key.lstrip("_") for key in view(item)}
    ]
    best = max(found, key=lambda one: (_count(one, wanted), -_distance(one)[0], one.part == "model"), default=None)
    return {id(variable): key for variable, key in (best.pairs + best.reshaped if best else ())}


def _count(found: Match, wanted: Collection[int]) -> int:
    return sum(id(variable) in wanted for variable, _ in found.pairs)


def _distance(found: Match) -> tuple[int, int, bool, int]:
    """Returns the key that ranks matches: variables without a value, those missing entirely, and the object's place."""
    missing = sum(saved is None for _, _, saved, _ in found.misfits)
    return len(found.misfits), missing, found.part != "model", found.part.count("/")


def _match(model: Any, graph: CheckpointGraph, part: str, node: int, children_of: Children) -> Match:
    pairs, misfits, reshaped, met = [], [], [], set()
    needed = {
        id(native_variable(variable)): variable for variable in getattr(model, "weights", None) or model.variables
    }
    for name, variable, key in _walk(graph, node, model, children_of):
        met.add(id(variable))
        saved, here = graph.shapes.get(key or ""), tuple(variable.shape)
        if key is not None and saved == here:
            pairs.append((variable, key))
        elif id(variable) in needed:
            misfits.append((name, "another shape" if key else "missing in the checkpoint", saved, here))
            reshaped += [(variable, key)] if key else []
    for identity, variable in needed.items():
        if identity not in met:
            misfits.append((variable_path(variable), "missing in the checkpoint", None, tuple(variable.shape)))
    return Match(part, node, pairs, misfits, reshaped)


def _walk(
    graph: CheckpointGraph, node: int, model: Any, children_of: Children
) -> list[tuple[str, tf.Variable, str | None]]:
    """Walks model and checkpoint together; returns (path, variable, key) of each variable, once."""
    found: dict[int, tuple[str, tf.Variable, str | None]] = {}
    seen, waiting = set(), deque([("", node, model)])
    while waiting:
        path, at, item = waiting.popleft()
        if isinstance(item, (tf.Variable, keras.Variable)):
            variable, key = native_variable(item), graph.key(at)
            if found.get(id(variable), (path, variable, None))[2] is None:
                found[id(variable)] = (path, variable, key)
        elif (id(item), at) not in seen:
            seen.add((id(item), at))
            edges = graph.children(at)
            for name, child in children_of(item).items():
                below: Any = edges.get(name, edges.get(name.lstrip("_")))
                waiting.append((f"{path}/{name}".lstrip("/"), below, child))
    return list(found.values())


def _views(model: Any, graph: CheckpointGraph) -> list[Children]:
    """Returns the sets of names that a model's variables may have; each function maps an object to its children.

    In a checkpoint of a run that has recorded the user's numbers of layers, only names with these numbers count.
    """
    named, given, own = model_variables(model), read_layer_names(graph.prefix), layer_names(model)
    if given is not None and own is not None:
        place = {given.get(name, name): name for name in graph.children(graph.children(ROOT).get("model"))}
        by_number = {own.get(name, name): variable for name, variable in named.items()}
        named = {place[name]: variable for name, variable in by_number.items() if name in place}
        return [lambda item: named if item is model else {}]
    tracked = _remembering(tf.train.TrackableView.children)
    if named is model:
        return [tracked]
    return [
        lambda item: named if item is model else {},
        tracked,
        lambda item: _keras_two_children(item) if isinstance(item, keras.Model) else tracked(item),
    ]


def _keras_two_children(model: Any) -> dict[str, Any]:
    """Returns the layers by number, as in Keras 2's TensorFlow format, or by the names of attributes."""
    weighted = [layer for layer in model.layers if layer.weights]
    numbered = {f"layer_with_weights-{number}": layer for number, layer in enumerate(weighted)}
    if isinstance(model, (keras.Sequential, _functional())):
        return numbered
    return dict(tf.train.TrackableView.children(model))


@functools.cache
def _functional() -> type[keras.Model]:
    """Returns the class of functional models, which has no public name in Keras."""
    inputs = keras.Input((1,), name="inputs")
    return type(keras.Model(inputs, inputs, name="functional"))


def _remembering(children_of: Children) -> Children:
    known: dict[int, Mapping[str, Any]] = {}

    def children(item: Any) -> Mapping[str, Any]:
        if id(item) not in known:
            known[id(item)] = children_of(item)
        return known[id(item)]

    return children


def _named_averages(graph: CheckpointGraph, name: str) -> Mapping[str, int]:
    """Returns a dict from path to node of the moving averages of a name."""
    root = graph.children(ROOT)
    sections = {**({AVERAGE: root[AVERAGE]} if AVERAGE in root else {}), **graph.children(root.get("more_averages"))}
    if name not in sections:
        raise UsageError(
            f"averaged: {graph.prefix} holds no average {name!r}; {suggestion(name, [WEIGHTS, *sections])}"
        )
    return graph.children(sections[name])


def _with_averages(model: Any, graph: CheckpointGraph, found: Match, saved: Mapping[str, int]) -> Match:
    """Replaces the weights in a match by moving averages, nodes by path; variables without an average keep theirs."""
    for trainable_only in (True, False):
        variables = averaged_variables(model, EMAConfig(trainable_weights_only=trainable_only))
        names = average_keys(variables)
        # One of several optimizers may average its part of the trainable variables; otherwise all are averaged.
        if saved.keys() <= set(names) if trainable_only else saved.keys() == set(names):
            nodes = {
                id(native_variable(one)): saved[name]
                for one, name in zip(variables, names, strict=True)
                if name in saved
            }
            keys = {variable: graph.key(node) for variable, node in nodes.items()}
            pairs = [(variable, keys.get(id(variable)) or key) for variable, key in found.pairs]
            return Match(found.part, found.node, pairs, found.misfits, found.reshaped, averaged=True)
    raise UsageError(
        f"the moving averages in {graph.prefix} belong to other variables than those of this model; build the model as "
        "the run did, use load_model, or give averaged=False to load the weights themselves"
    )
