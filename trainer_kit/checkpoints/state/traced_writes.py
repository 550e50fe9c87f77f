"""Finds the variables, tables and queues that a traced graph reads and writes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.runtime.tensorflow_internals import get_called_functions

# Collective operations use variables only for their order.
_READS = re.compile(
    r"Collective|ReadVariableOp$|VariableShape$|VarIsInitializedOp$|ResourceGather(Nd)?$"
    r"|LookupTable(Find|Size|Export)|QueueSize"
)
_KIND = re.compile(r'type="?([\w:]+)')
_DESCRIPTIONS = {
    "Var": "a variable",
    "LookupInterface": "a hash table",
    "QueueInterface": "a queue",
    "IteratorResource": "an iterator of tf.data",
}


def find_written_handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the handles that a traced graph changes, in its order.

    These are handles of outer variables, tables, queues and iterators. The search includes loops,
    branches and called functions, and those of replicas.

    Args:
      graph: The traced FuncGraph.
    """
    consumers: dict[int, list[tf.Operation]] = defaultdict(list)
    for subgraph in _graphs(graph):
        for outer, inner in subgraph.captures:
            for operation in inner.consumers():
                # The functions of a call, a loop or a branch are searched by themselves.
                attributes = operation.node_def.attr.values()
                if not any(value.HasField("func") or value.list.func for value in attributes):
                    consumers[id(outer)].append(operation)

    # A handle without any consumer counts as changed.
    written_handles = []
    for handle in find_captured_handles(graph):
        operations = consumers[id(handle)]
        if not operations or any(not _READS.match(operation.type) for operation in operations):
            written_handles.append(handle)
    return written_handles


def find_captured_handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the handles that a traced graph uses, in its order.

    These are handles of outer variables, tables, queues and iterators.
    """
    return [
        outer
        for outer, _ in graph.captures
        if outer.dtype == tf.resource and _kind(outer) in _DESCRIPTIONS
    ]


def variables_by_handle(graph: tf.Graph) -> dict[int, tf.Variable]:
    """Returns the variables that a graph uses by the `id` of their handles.

    Of a variable on several replicas, the variable of each replica is returned.
    """
    variables = {}
    for subgraph in _graphs(graph):
        for variable in subgraph.variables:
            # A distributed variable has one of its own on each replica.
            for part in getattr(variable, "values", None) or [variable]:
                variables[id(part.handle)] = part
    return variables


def describe_handle(handle: tf.Tensor) -> str:
    """Returns the description of a handle of `find_captured_handles`, for messages."""
    return _DESCRIPTIONS[_kind(handle)]


def _graphs(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yields a graph and the graphs of all functions that it calls, each once."""
    visited: set[int] = set()
    waiting = [graph]
    while waiting:
        subgraph = waiting.pop()
        if id(subgraph) not in visited:
            visited.add(id(subgraph))
            yield subgraph
            waiting += get_called_functions(subgraph).values()


def _kind(handle: tf.Tensor) -> str:
    match = _KIND.search(str(handle))
    if match is None:
        return ""
    return match.group(1).rpartition("::")[2]
