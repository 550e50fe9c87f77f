"""Replaces calls in a graph by the bodies of the called functions, so that the graph shows all operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import functions_called

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_NOTES = ("_class", "_output_shapes")  # attributes that name other nodes, or shapes that the body may know better


def with_calls_inlined(graph: Any) -> tf.Graph:
    """Returns a graph without function calls, for inspection only; `graph` itself if it has no calls.

    Runs eagerly, on the host. Calls come from layers with a tf.function and from loaded SavedModels. Variables become
    handles with known shapes, so no weight is copied. Control dependencies are left out. A call whose function has no
    Python graph stays a call.

    Args:
      graph: The graph of a concrete function.
    """
    if not any(operation.type in CALLS for operation in graph.get_operations()):
        return graph
    definition = tf.compat.v1.GraphDef()
    definition.library.CopyFrom(graph.as_graph_def().library)
    definition.node.extend(_nodes(graph, "", {}, {}))
    _know_shapes(definition, graph)
    result = tf.Graph()
    with result.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return result


def _know_shapes(definition: Any, graph: Any) -> None:
    """Replaces the placeholders of variables by handles with a dtype and a shape."""
    around = [graph, *functions_called(graph).values()]
    variables = {id(variable.handle): variable for one in around for variable in one.variables}
    captured = {inner.op.name: variables.get(id(outer)) for outer, inner in graph.captures}
    for node in definition.node:
        if (variable := captured.get(node.name)) is not None:
            node.CopyFrom(type(node)(name=node.name, op="VarHandleOp"))
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())


def _nodes(graph: Any, prefix: str, given: dict[str, str], known: dict[str, tf.Graph]) -> Iterator[Any]:
    """Yields the NodeDefs of a graph and, instead of its calls, those of the called functions.

    Args:
      graph: The graph of a function.
      prefix: The prefix for the names of its nodes.
      given: A dict from the name of each input of the function to the tensor that the call passes.
      known: A dict from name to graph of the functions that are known in the surrounding graphs.
    """
    known, given = {**known, **functions_called(graph)}, dict(given)
    inputs = set(given)
    for node in graph.as_graph_def().node:
        if f"{node.name}:0" in inputs:
            continue
        sources = [_renamed(source, prefix, given) for source in node.input if not source.startswith("^")]
        node.name = f"{prefix}{node.name}"
        called = known.get(node.attr["f"].func.name) if node.op in CALLS else None
        if called is not None:
            below = {tensor.name: source for tensor, source in zip(called.inputs, sources, strict=True)}
            yield from _nodes(called, f"{node.name}/", below, known)
            name = node.name.removeprefix(prefix)
            outputs = [_renamed(tensor.name, f"{node.name}/", below) for tensor in called.outputs]
            given |= {f"{name}:{number}": source for number, source in enumerate(outputs)}
            continue
        for note in _NOTES:
            node.attr.pop(note, None)
        del node.input[:]
        node.input.extend(sources)
        yield node


def _renamed(source: str, prefix: str, given: dict[str, str]) -> str:
    """Returns the name of a function's tensor in the resulting graph."""
    name = source if ":" in source else f"{source}:0"
    return given.get(name, f"{prefix}{name}")
