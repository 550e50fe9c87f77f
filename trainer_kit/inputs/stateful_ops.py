"""Recognises ops whose state no checkpoint holds: Python functions and random number generators. No TensorFlow.

Both a training step and a plain dataset are searched for them: a resumed run would continue with
another state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

# Not PyFuncStateless: numpy_function(stateful=False) is a promise of its user.
_PYTHON = ("PyFunc", "EagerPyFunc")


def iterate_nodes(graph: Any) -> Iterator[Any]:
    """Yields the NodeDefs of a GraphDef, and those of all functions that come with it."""
    return itertools.chain(graph.node, *(function.node_def for function in graph.library.function))


def find_unsaved_state(op: str, definition: Any) -> Literal["python", "random"] | None:
    """Returns the kind of state that an op keeps outside of checkpoints; None if it has none, or has it in a variable.

    Args:
      op: The name of the op.
      definition: The OpDef that TensorFlow has registered for it; None if there is none.
    """
    if op in _PYTHON:
        return "python"
    draws = (
        definition is not None
        and definition.is_stateful
        and any(one.name == "seed" for one in definition.attr)
    )
    return "random" if draws else None
