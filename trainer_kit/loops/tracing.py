"""The framework's own functions in graph. Loops tell when they are traced again: it takes as long as the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_LOG = logging.getLogger(__name__)


def graph_function(function: Callable[..., Any]) -> Any:
    """Returns `function`, which is the framework's own, as a tf.function; AutoGraph does not see it."""
    return tf.function(function, autograph=False)


def eager(function: Callable[..., Any]) -> Any:
    """Returns `function` as it is, where another loop has it compiled."""
    return function


class LoopFunction:
    """A loop or a step in graph. Called with an iterator first; eager, on the host.

    Args:
      function: the framework's own.
      name: of what it does, for the warning.

    Attributes:
      function: as a tf.function.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self._name = graph_function(function), name
        self._spec: Any = None  # of the elements that it was called with last

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        traced_before = self.function.experimental_get_tracing_count()
        result = self.function(iterator, *arguments)
        spec = getattr(iterator, "element_spec", None)
        if 0 < traced_before < self.function.experimental_get_tracing_count():
            tell_retracing(self._name, spec, self._spec)
        self._spec = spec
        return result

    def graph(self, *arguments: Any) -> tf.Graph:
        """Returns the graph for arguments like these."""
        return self.function.get_concrete_function(*arguments).graph


def tell_retracing(name: str, now: Any, before: Any) -> None:
    """Warns that a function is traced again, for other batches: specs of what they are and of what they were."""
    _LOG.warning(
        "%s is traced again, which takes as long as the first time: its batches are %s, and were %s; give batches "
        "of one shape",
        *(name, _described(now), _described(before)),
    )


def _described(spec: Any) -> str:
    parts = [part for part in tf.nest.flatten(spec, expand_composites=True) if isinstance(part, tf.TensorSpec)]
    return ", ".join(f"{part.dtype.name}{'[?]' if part.shape.rank is None else part.shape}" for part in parts)
