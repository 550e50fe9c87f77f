"""Finds the variables and tables that a traced graph reads and writes, and the user's line that writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import functions_called
from trainer_kit.errors.user_frames import own_frames

_HARMLESS = re.compile(
    r"Collective|ReadVariableOp$|VariableShape$|VarIsInitializedOp$|ResourceGather(Nd)?$|LookupTable(Find|Size|Export)"
)
_KIND = re.compile(r'type="?([\w:]+)')
_WHAT = {"Var": "a variable", "LookupInterface": "a hash table", "IteratorResource": "an iterator of tf.data"}


def written(graph: Any) -> list[Any]:
    """Returns the handles of outer variables, tables and iterators that a traced graph changes.

    The search includes loops, branches and called functions, and those of replicas.

    Args:
      graph: The traced FuncGraph.
    """
    captured = _captured(graph)
    outside = [outer for outer, _ in graph.captures if outer.dtype == tf.resource and _kind(outer) in _WHAT]
    users = [(handle, _users(captured, handle)) for handle in outside]
    return [handle for handle, known in users if not known or not all(map(_is_harmless, known))]


def variables_used(graph: Any) -> list[Any]:
    """Returns the handles of outer variables that a traced graph reads or writes."""
    return [outer for outer, _ in graph.captures if outer.dtype == tf.resource and _kind(outer) == "Var"]


def variable_of(graph: Any, handle: Any) -> Any:
    """Returns the variable that a handle belongs to; None if the graph does not know it."""
    for variable in (one for part in _graphs(graph) for one in part.variables):
        if any(part.handle is handle for part in getattr(variable, "values", None) or [variable]):
            return variable
    return None


def described(graph: Any, handle: Any) -> str:
    """Returns the description of a handle of `written`, and where the graph changes it, for messages."""
    what, variable = _WHAT[_kind(handle)], variable_of(graph, handle)
    if variable is not None:
        what = f"the variable {variable.name.partition(':')[0]} ({variable.dtype.name} {list(variable.shape)})"
    return f"{what}{_place(graph, handle)}"


def _graphs(graph: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields a graph and the graphs of all functions that it calls."""
    seen = set() if seen is None else seen
    if id(graph) in seen:
        return
    seen.add(id(graph))
    yield graph
    for called in functions_called(graph).values():
        yield from _graphs(called, seen)


def _captured(graph: Any) -> dict[int, list[Any]]:
    """Returns, by the `id` of a handle, the tensors that stand for it in a graph and the functions that it calls."""
    found: dict[int, list[Any]] = {}
    for part in _graphs(graph):
        for outer, inner in part.captures:
            found.setdefault(id(outer), []).append(inner)
    return found


def _users(captured: dict[int, list[Any]], handle: Any) -> list[Any]:
    """Returns the operations that take a handle, without calls, loops and branches, whose bodies are searched."""
    found = [operation for inner in captured.get(id(handle), ()) for operation in inner.consumers()]
    return [
        one
        for one in found
        if not any(attribute.HasField("func") or attribute.list.func for attribute in one.node_def.attr.values())
    ]


def _is_harmless(operation: Any) -> bool:
    """Whether an operation leaves a resource unchanged; collective operations use variables only for their order."""
    return _HARMLESS.match(operation.type) is not None


def _kind(handle: Any) -> str:
    match = _KIND.search(str(handle))
    return match.group(1).rpartition("::")[2] if match else ""


def _place(graph: Any, handle: Any) -> str:
    """Returns ` (changed in file:line)` for the innermost frame of the user's code; "" if none is known."""
    for operation in _users(_captured(graph), handle):
        frames = own_frames(operation.traceback or ())
        if frames and not _is_harmless(operation):
            return f" (changed in {os.path.relpath(frames[-1].file)}:{frames[-1].line})"
    return ""
