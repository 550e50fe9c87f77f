"""The framework's own functions in graph. Loops tell when they are traced again: it takes as long as the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
    """A tf.function of a loop or a step that knows its graph; called with an iterator first, eager, on the host.

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
        self._loop, self._name, self._specs, self._check = function, name, specs, check
        self.function = graph_function(self._trace)
        self._newest: Any = None  # spec of the elements of its iterator
        self.newest_graph: tf.Graph | None = None

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        if self._specs and iterator.element_spec != self._newest:
            self.graph(iterator)  # one for all arguments like these
        return self.function(iterator, *arguments)

    def graph(self, iterator: Any, *arguments: Any) -> tf.Graph | None:
        """Returns the graph for an iterator and arguments like these; None where TensorFlow runs functions eagerly."""
        if tf.config.functions_run_eagerly():
            return None
        like = self._specs(iterator.element_spec) if self._specs else arguments
        return self.function.get_concrete_function(iterator, *like).graph

    def _trace(self, iterator: Any, *arguments: Any) -> Any:
        """Calls the function; TensorFlow runs this Python code whenever it makes a graph, and only then."""
        if not tf.inside_function():
            return self._loop(iterator, *arguments)
        elements = getattr(iterator, "element_spec", None)
        if self.newest_graph is not None and elements != self._newest:
            _LOG.warning(
                "%s is traced again, which takes as long as the first time: its batches are %s, and were %s; give "
                "batches of one shape",
                *(self._name, _described(elements), _described(self._newest)),
            )
        results = self._loop(iterator, *arguments)
        graph = tf.compat.v1.get_default_graph()
        self._check(graph)
        self.newest_graph, self._newest = graph, elements
        return results


def _described(spec: Any) -> str:
    parts = [part for part in tf.nest.flatten(spec, expand_composites=True) if isinstance(part, tf.TensorSpec)]
    return ", ".join(f"{part.dtype.name}{'[?]' if part.shape.rank is None else part.shape}" for part in parts)
