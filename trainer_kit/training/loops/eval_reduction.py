"""Runs evaluation steps in graph and reduces their outputs to a state of any structure.

A graph has to know structure, dtypes and shapes of the state before it runs. So the first step, which creates the
state, has its own graph. The specs that it returns, and those after one more reduction, show which dimensions grow:
these are left open. Nothing runs while the graphs are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.inputs.autograph import converted
from trainer_kit.training.loops.iterators import OneElement, over_elements
from trainer_kit.training.loops.tracing import graph_function
from trainer_kit.training.loops.tracing_side_effects import SideEffects
from trainer_kit.training.loops.train_loop import Step

Reduce = Callable[[Any, Any], Any]


class NotInGraph(Exception):
    """A reduction cannot be part of a graph; the message says why."""


class GraphReduction:
    """Runs evaluation steps in graph until the data ends, enough are done, or a stop is requested; returns a state.

    Args:
      step: A function that uses one element of an iterator and returns outputs.
      stop: The flag of stop_variable.
      reduce_fn: A function of state and outputs that returns the new state; runs on the host. Without an initial state,
        its state is None for the first step.
      watched: Objects whose attributes `reduce_fn` must not change.

    Attributes:
      reduce_fn: The argument of this name.
    """

    def __init__(self, step: Step, stop: tf.Variable, reduce_fn: Reduce, watched: Sequence[Any] = ()) -> None:
        self.reduce_fn = reduce_fn
        self._step, self._stop, self._watched = step, stop, watched
        self._outputs: Any = None  # specs of the outputs of a step, from the last trace
        self._outputs_in: dict[tf.Graph, Any] = {}  # the same, of the step in each graph
        self._first = graph_function(self._first_step)
        self._outputs_only = graph_function(lambda iterator: self._noted(step(iterator)))
        self._reduction = graph_function(self._reduced)
        self._rest = graph_function(self._all_steps)

    def trace(self, iterator: Any, state: Any) -> None:
        """Traces all graphs that an evaluation with this iterator and state needs; runs nothing.

        Raises:
          NotInGraph: when one of them cannot be traced.
        """
        try:
            first = (self._first if state is None else self._outputs_only).get_concrete_function(iterator)
            outputs = self._outputs_in.setdefault(first.graph, self._outputs)
            spec = self._settled(_specs(first.structured_outputs if state is None else _tensors(state)), outputs)
            self._rest.get_concrete_function(iterator, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32), spec)
        except Exception as error:  # whatever the task's own code raises where it meets tensors without values
            raise NotInGraph(_reason(error)) from error

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph that holds the first step; None before the first trace."""
        return next(reversed(self._outputs_in), None)

    def __call__(self, iterator: Any, limit: int, state: Any) -> tuple[int, Any]:
        """Returns the number of steps done and the state, as eager tensors; `limit` -1 means all of the data."""
        done = 0
        if limit == 0 or self._stop.numpy():
            return done, state
        if state is None:
            try:
                state, done = self._first(iterator), 1
            except (StopIteration, tf.errors.OutOfRangeError):
                return done, state
        if done == limit:
            return done, state
        count, state = self._rest(iterator, tf.constant(limit), tf.constant(done), _tensors(state))
        return int(count), state

    def _first_step(self, iterator: Any) -> Any:
        return self._reduced(None, self._noted(self._step(iterator)))

    def _all_steps(self, iterator: Any, limit: tf.Tensor, done: tf.Tensor, state: Any) -> Any:
        def one_step(element: OneElement, flat: Any) -> Any:
            outputs = self._noted(self._step(element))
            state_now = tf.nest.pack_sequence_as(state, flat, expand_composites=True)
            return tf.nest.flatten(self._reduced(state_now, outputs), expand_composites=True)

        flat = tf.nest.flatten(state, expand_composites=True)
        done, flat = over_elements(iterator, limit, self._stop, one_step, flat, done)
        return done, tf.nest.pack_sequence_as(state, flat, expand_composites=True)

    def _reduced(self, state: Any, outputs: Any) -> Any:
        """Reduces the outputs of one step; runs in graph, on the host, which supports strings and has the memory."""
        old = tf.nest.flatten(state)
        state = tf.nest.pack_sequence_as(state, old)  # its own dicts and lists, which it may change
        kept = SideEffects(self._watched)
        try:
            with tf.device("CPU:0"):
                new = converted(self.reduce_fn)(state, outputs)
        finally:
            changed = kept.restore()
        return self._checked(old, new, changed)

    def _checked(self, old: Sequence[Any], state: Any, changed: Sequence[str]) -> Any:
        if changed:
            raise NotInGraph(f"the aggregation also changes {', '.join(changed)}, besides the state that it returns")
        computed = [leaf for leaf in tf.nest.flatten(state) if tf.is_tensor(leaf)]
        if all(any(leaf is before for before in old) for leaf in computed):
            raise NotInGraph("the state that the aggregation returns holds no tensor that is computed from the logs")
        return _tensors(state)

    def _noted(self, outputs: Any) -> Any:
        """Returns the outputs of a step as a tf.function would return them, and remembers their specs."""
        outputs = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), outputs
        )
        self._outputs = _specs(outputs)
        return outputs

    def _settled(self, spec: Any, outputs: Any) -> Any:
        """Returns the specs of the state, with every dimension left open that a reduction changes."""
        while True:
            after = _specs(self._reduction.get_concrete_function(spec, outputs).structured_outputs)
            common = _common(spec, after)
            if common == spec:
                return spec
            spec = common


def _reason(error: Exception) -> str:
    """Returns the last line of a message: AutoGraph puts the error itself below its stack of places."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kind = f"{type(error).__name__}: "
    text = lines[-1].removeprefix(kind)
    return text if isinstance(error, NotInGraph) else kind + text


def _common(one: Any, other: Any) -> Any:
    """Returns the specs that both states fit."""
    try:
        tf.nest.assert_same_structure(one, other)
    except (ValueError, TypeError) as error:
        raise NotInGraph("the state changes its structure from step to step") from error
    leaves = []
    for before, after in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        leaf = before.most_specific_common_supertype([after])
        if leaf is None:
            raise NotInGraph(f"a part of the state is {before} after one step and {after} after the next")
        leaves.append(leaf)
    return tf.nest.pack_sequence_as(one, leaves)


def _tensors(state: Any) -> Any:
    """Returns the state with arrays and whole numbers converted to tensors.

    Raises:
      NotInGraph: for values that a tensor does not hold exactly: strings, and floats, which would lose half their bits.
    """

    def tensor(leaf: Any) -> Any:
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
            return leaf
        if isinstance(leaf, (int, np.ndarray, np.number, np.bool_)):
            return tf.convert_to_tensor(leaf)
        raise NotInGraph(f"the state holds a {type(leaf).__name__}, and a graph needs tensors")

    return tf.nest.map_structure(tensor, state)


def _specs(values: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), values)
