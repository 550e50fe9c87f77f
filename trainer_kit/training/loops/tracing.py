"""The framework's own functions in graph. Loops tell when they are traced again: it takes as long as the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.training.loops.iterators import Iterators

_LOG = logging.getLogger(__name__)
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator, Iterators)


def graph_function(function: Callable[..., Any]) -> Any:
    """Returns `function`, which is the framework's own, as a tf.function; AutoGraph does not see it."""
    return tf.function(function, autograph=False)


def eager(function: Callable[..., Any]) -> Any:
    """Returns `function` as it is, where another loop has it compiled."""
    return function


class LoopFunction:
    """A loop or a step in graph. Called with an iterator first, then with tensors always alike; eager, on the host.

    It looks itself for the graph that a call needs, by the type of the iterator, and gives the iterator to it as the
    tensors that it consists of. To find, check and convert all that takes a tf.function half a millisecond, warm.

    Args:
      function: the framework's own.
      name: of what it does, for the warning.
      specs: returns the specs of the arguments after the iterator, from that of its elements; None: the arguments of
        the first call are what all are like.
      check: raises an error where a graph that was traced is no good.

    Attributes:
      function: as a tf.function.
      newest_graph: the graph that was made last; None before the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        specs: Callable[[Any], Sequence[Any]] | None = None,
        check: Callable[[tf.Graph], None] = lambda graph: None,
    ) -> None:
        self.function, self._name = graph_function(function), name
        self._function, self._specs, self._check = function, specs, check
        self._traced: dict[Any, Any] = {}  # by the kind of the iterator
        self._newest: Any = None  # spec of its elements
        self.newest_graph: tf.Graph | None = None

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        if tf.config.functions_run_eagerly() or not isinstance(iterator, _ITERATORS):
            return self.function(iterator, *arguments)
        traced = self._traced.get(_kind(iterator)) or self._trace(iterator, arguments)
        return traced(tf.nest.flatten(iterator, expand_composites=True), *arguments)

    def graph(self, iterator: Any, *arguments: Any) -> tf.Graph | None:
        """Returns the graph for an iterator and arguments like these; None where TensorFlow runs functions eagerly."""
        if tf.config.functions_run_eagerly() or not isinstance(iterator, _ITERATORS):
            return None
        return (self._traced.get(_kind(iterator)) or self._trace(iterator, arguments)).graph

    def _trace(self, iterator: Any, arguments: Sequence[Any]) -> Any:
        spec = tf.nest.map_structure(tf.type_spec_from_value, iterator)

        def function(tensors: Any, *arguments: Any) -> Any:
            return self._function(tf.nest.pack_sequence_as(spec, tensors, expand_composites=True), *arguments)

        elements = iterator.element_spec
        if self._traced:
            _LOG.warning(
                "%s is traced again, which takes as long as the first time: its batches are %s, and were %s; give "
                "batches of one shape",
                *(self._name, _described(elements), _described(self._newest)),
            )
        tensors = tf.nest.flatten(iterator, expand_composites=True)
        like = self._specs(elements) if self._specs else arguments
        traced = graph_function(function).get_concrete_function(tensors, *like)
        self._check(traced.graph)
        self.newest_graph = traced.graph
        self._traced[_kind(iterator)], self._newest = traced, elements
        return traced


def _kind(iterator: Any) -> Any:
    """The type of an iterator, or of several, to look for the graph by."""
    if isinstance(iterator, Iterators):
        return tuple((name, tf.type_spec_from_value(one)) for name, one in sorted(iterator.items()))
    return tf.type_spec_from_value(iterator)


def _described(spec: Any) -> str:
    parts = [part for part in tf.nest.flatten(spec, expand_composites=True) if isinstance(part, tf.TensorSpec)]
    return ", ".join(f"{part.dtype.name}{'[?]' if part.shape.rank is None else part.shape}" for part in parts)
