"""Recognises ops whose state no checkpoint contains: Python functions and random generators.

Both a training step and a plain dataset are searched for such ops, because a resumed run would
continue with another state. No TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

# Not PyFuncStateless: numpy_function(stateful=False) is a promise of its user.
_PYTHON = ("PyFunc", "EagerPyFunc")


def iterate_nodes(graph: Any) -> Iterator[Any]:
    """Yields the NodeDefs of a GraphDef, and those of all functions that come with it."""
    functions = graph.library.function
    return itertools.chain(graph.node, *(function.node_def for function in functions))


def find_unsaved_state(op: str, definition: Any) -> Literal["python", "random"] | None:
    """Returns the kind of state that an op has outside of checkpoints.

    Returns None if the op has no state, or has its state in a variable.

    Args:
      op: The name of the op.
      definition: The OpDef that TensorFlow has registered for it, or None.
    """
    if op in _PYTHON:
        return "python"
    is_random = (
        definition is not None
        and definition.is_stateful
        and any(attribute.name == "seed" for attribute in definition.attr)
    )
    return "random" if is_random else None
