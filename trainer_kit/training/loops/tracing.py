"""The framework's own functions in graph. Loops tell when they are traced again: it takes as long as the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOG = logging.getLogger(__name__)
_NONE = object()


def graph_function(function: Callable[..., Any]) -> Any:
    """Returns `function`, which is the framework's own, as a tf.function; AutoGraph does not see it."""
    return tf.function(function, autograph=False)


def eager(function: Callable[..., Any]) -> Any:
    """Returns `function` as it is, where another loop has it compiled."""
    return function


class LoopFunction:
    """A tf.function of a loop or a step that knows its graphs; called with an iterator first, eager, on the host.

    Args:
      function: the framework's own.
      name: of what it does, for the warning.
      specs: returns the specs of the arguments after the iterator, from that of its elements; None: the arguments of
        the first call are what all are like.
      check: raises an error where a graph that was traced is no good.

    Attributes:
      function: the tf.function.
      newest_graph: the graph that was made last; None before the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        specs: Callable[[Any], Sequence[Any]] | None = None,
        check: Callable[[tf.Graph], None] = lambda graph: None,
    ) -> None:
        self.function = graph_function(function)
        self._name, self._specs, self._check = name, specs, check
        self._elements: Any = _NONE  # the spec of the elements of the newest graph's iterator
        self._graphs: list[tf.Graph] = []
        self.newest_graph: tf.Graph | None = None

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        if _elements_of(iterator) != self._elements:
            self.graph(iterator, *arguments)
        return self.function(iterator, *arguments)

    def graph(self, iterator: Any, *arguments: Any) -> tf.Graph | None:
        """Returns the graph for an iterator and arguments like these; None where TensorFlow runs functions eagerly."""
        if tf.config.functions_run_eagerly():
            return None
        like = self._specs(iterator.element_spec) if self._specs else arguments
        return self.noted(self.function.get_concrete_function(iterator, *like).graph, iterator)

    def noted(self, graph: tf.Graph, iterator: Any) -> tf.Graph:
        """Returns a graph of the function, and notes it; warns where it is not the first one."""
        elements = _elements_of(iterator)
        if not any(graph is one for one in self._graphs):
            if self._graphs:
                _LOG.warning(
                    "%s is traced again, which takes as long as the first time: its batches are now %s, and were %s "
                    "before; give all batches the same shape",
                    *(self._name, _described(elements), _described(self._elements)),
                )
            self._check(graph)
            self._graphs.append(graph)
            self.newest_graph = graph
        self._elements = elements
        return graph


def _elements_of(iterator: Any) -> Any:
    return getattr(iterator, "element_spec", None)


def _described(spec: Any) -> str:
    parts = [part for part in tf.nest.flatten(spec, expand_composites=True) if isinstance(part, tf.TensorSpec)]
    return ", ".join(f"{part.dtype.name}{'[?]' if part.shape.rank is None else part.shape}" for part in parts)
