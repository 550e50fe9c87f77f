"""Compiles trainer_kit's functions, and warns when a loop is traced again, which takes as long as the first time."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOG = logging.getLogger(__name__)
_NONE = object()


def graph_function(function: Callable[..., Any]) -> Any:
    """Returns a function of trainer_kit as a tf.function, without AutoGraph."""
    return tf.function(function, autograph=False)


def eager(function: Callable[..., Any]) -> Any:
    """Returns `function` unchanged; used instead of graph_function where nothing is compiled."""
    return function


class LoopFunction:
    """A tf.function of a loop or a step that knows its graphs. Its first argument is an iterator.

    It is called eagerly, on the host.

    Args:
      function: The function of trainer_kit to compile.
      name: The name of the loop or step, for the warning.
      specs: A function of the iterator's element spec that returns the specs of the other arguments; None: the
        arguments of the first call show them.
      check: A function that raises an error when a traced graph cannot be used.

    Attributes:
      function: The tf.function.
      newest_graph: The newest graph; None before the first trace.
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
        self._last: Callable[[], Any] = lambda: None  # returns the iterator of the last call
        self._concrete: Any = None  # the concrete function for it
        self._graphs: list[tf.Graph] = []
        self.newest_graph: tf.Graph | None = None

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        if tf.config.functions_run_eagerly():
            return self.function(iterator, *arguments)
        if self._last() is iterator:
            # To look the concrete function up again takes 0.15 ms, a quarter of the call of a loop without steps.
            self._concrete = self._concrete or self.function.get_concrete_function(
                iterator, *self._like(iterator, arguments)
            )
            return self._concrete(iterator, *arguments)
        if _elements_of(iterator) != self._elements:
            self.graph(iterator, *arguments)
        self._last, self._concrete = _weak(iterator), None
        return self.function(iterator, *arguments)

    def graph(self, iterator: Any, *arguments: Any) -> tf.Graph | None:
        """Returns the graph for such an iterator and arguments; None if TensorFlow runs functions eagerly."""
        if tf.config.functions_run_eagerly():
            return None
        like = self._like(iterator, arguments)
        return self.noted(self.function.get_concrete_function(iterator, *like).graph, iterator)

    def noted(self, graph: tf.Graph, iterator: Any) -> tf.Graph:
        """Records a graph of the function and returns it; warns if it is not the first one."""
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

    def _like(self, iterator: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        """Returns what stands for the arguments after the iterator when the function is traced."""
        return self._specs(iterator.element_spec) if self._specs else arguments


def _weak(iterator: Any) -> Callable[[], Any]:
    """Returns a weak reference: other code decides when an iterator is deleted. Some Python iterators have none."""
    try:
        return weakref.ref(iterator)
    except TypeError:
        return lambda: None


def _elements_of(iterator: Any) -> Any:
    return getattr(iterator, "element_spec", None)


def _described(spec: Any) -> str:
    parts = [part for part in tf.nest.flatten(spec, expand_composites=True) if isinstance(part, tf.TensorSpec)]
    return ", ".join(f"{part.dtype.name}{'[?]' if part.shape.rank is None else part.shape}" for part in parts)
