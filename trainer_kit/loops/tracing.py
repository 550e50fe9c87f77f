"""The framework's own functions in graph. Loops tell when they are traced again: it takes as long as the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOG = logging.getLogger(__name__)
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


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

    Attributes:
      function: as a tf.function.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self._name = graph_function(function), name
        self._function = function
        self._traced: dict[Any, Any] = {}  # by the type of the iterator
        self._newest: Any = None  # spec of its elements

    def __call__(self, iterator: Any, *arguments: Any) -> Any:
        if tf.config.functions_run_eagerly() or not isinstance(iterator, _ITERATORS):
            return self.function(iterator, *arguments)
        spec = tf.type_spec_from_value(iterator)
        traced = self._traced.get(spec) or self._trace(spec, iterator, arguments)
        return traced(tf.nest.flatten(iterator, expand_composites=True), *arguments)

    def graph(self, iterator: Any, *arguments: Any) -> tf.Graph:
        """Returns the graph for an iterator and arguments like these."""
        spec = tf.type_spec_from_value(iterator)
        return (self._traced.get(spec) or self._trace(spec, iterator, arguments)).graph

    def _trace(self, spec: Any, iterator: Any, arguments: Sequence[Any]) -> Any:
        def function(tensors: Any, *arguments: Any) -> Any:
            return self._function(tf.nest.pack_sequence_as(spec, tensors, expand_composites=True), *arguments)

        if self._traced:
            tell_retracing(self._name, iterator.element_spec, self._newest)
        tensors = tf.nest.flatten(iterator, expand_composites=True)
        traced = graph_function(function).get_concrete_function(tensors, *arguments)
        self._traced[spec], self._newest = traced, iterator.element_spec
        return traced


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
