"""Evaluation loops: in one graph or step by step, with metrics only or with a reduced state.

A graph has to know structure, dtypes and shapes of the state before it runs. So the first step,
which creates the state, has a separate graph. The specs that it returns, and those after one more
reduction, show which dimensions grow. These are left open. Nothing runs while the graphs are
traced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.dataset_iterator import ValidationData
from trainer_kit.training.loops.iterators import SingleElementIterator, as_int32, loop_over_elements
from trainer_kit.training.loops.loop_function import (
    LoopFunction,
    Packed,
    Readback,
    check_one_thread,
    eager,
    graph_function,
)
from trainer_kit.training.loops.train_loop import LoopSteps
from trainer_kit.training.metric_set import remove_engine_results
from trainer_kit.typing import IntLike, NestedSpec

_LOG = logging.getLogger(__name__)

# Containers with more items are not searched for nested ones. They are data, not an aggregated
# state.
_LARGE = 1000
_ABSENT: Any = object()

# A function of the state and the outputs of a step that returns the new state.
Reduce = Callable[[Any, Any], Any]
# An object in an attribute whose contents are remembered.
Container = list[Any] | dict[Any, Any] | set[Any]


@tf.autograph.experimental.do_not_convert
def run_one_step(steps: LoopSteps, iterator: Iterator[object]) -> Any:
    """Runs a step, then `steps.after_step()`, and returns the outputs of the step.

    Runs in graph or eagerly.
    """
    outputs = apply_autograph(steps.step)(iterator)
    steps.after_step()
    return outputs


class AttributeSnapshot:
    """Remembers the attributes of objects, and the contents of the containers in them.

    The containers are lists, dicts and sets, also nested ones.

    Args:
      objects: The objects whose attributes are remembered.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        self._attributes = [(item, dict(vars(item))) for item in objects]
        self._contents: list[tuple[str, Container, list[Any], list[Any]]] = []
        for item in objects:
            for name, container in _containers(item):
                items = _items(container)
                identities = _identify_items(container)
                self._contents.append((name, container, items, identities))

    def restore(self) -> list[str]:
        """Undoes all changes since, and returns the names of the changed attributes."""
        changed: list[str] = []

        # Attributes are restored one by one, since other threads may read them.
        for item, before in self._attributes:
            now = vars(item)
            for name in {*now, *before}:
                if now.get(name, _ABSENT) is before.get(name, _ABSENT):
                    continue
                changed.append(f"{type(item).__name__}.{name}")
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]

        for name, container, items, identities in self._contents:
            if _identify_items(container) == identities:
                continue
            changed.append(name)
            container.clear()
            if isinstance(container, list):
                container.extend(items)
            else:
                container.update(items)
        return sorted(set(changed))


def _containers(item: object) -> Iterator[tuple[str, Container]]:
    """Yields every container in the attributes, once, with the name of its attribute."""
    visited: set[int] = set()
    kind = type(item).__name__
    pending = []
    for name, value in vars(item).items():
        pending.append((f"{kind}.{name}", value))

    while pending:
        name, value = pending.pop()
        if not isinstance(value, (list, dict, set, tuple)) or id(value) in visited:
            continue
        visited.add(id(value))

        # A tuple cannot change, but the containers in it can.
        if not isinstance(value, tuple):
            yield name, value
        if len(value) <= _LARGE:
            parts = value.values() if isinstance(value, dict) else value
            pending += [(name, part) for part in parts]


def _items(container: Container) -> list[Any]:
    """Returns the contents of a container, of a dict as pairs."""
    return list(container.items() if isinstance(container, dict) else container)


def _identify_items(container: Container) -> list[Any]:
    """Returns the ids of the contents of a container, which may not be comparable."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(item) for item in container]


class NotInGraph(Exception):
    """A reduction cannot be part of a graph. The message says why."""


class GraphReduction:
    """Runs evaluation steps in graph until the data ends, and reduces their outputs to a state.

    It ends earlier when enough steps are done, or when a stop is requested. Call it eagerly, on the
    host.

    Args:
      steps: What the loop runs. A step returns outputs.
      stop: The flag of stop_variable.
      reduce_fn: A function of state and outputs that returns the new state. It runs on the host.
        Without an initial state, its state is None for the first step.
      watched: Objects whose attributes `reduce_fn` must not change.

    Attributes:
      reduce_fn: The argument of this name.
    """

    def __init__(
        self, steps: LoopSteps, stop: tf.Variable, reduce_fn: Reduce, watched: Sequence[object] = ()
    ) -> None:
        self.reduce_fn = reduce_fn
        self._steps = steps
        self._stop = stop
        self._watched = watched

        # The specs of the outputs of a step, from the last trace and from that of each graph.
        self._output_specs: NestedSpec | None = None
        self._output_specs_by_graph: dict[tf.Graph, NestedSpec | None] = {}

        self._first_step_function = graph_function(self._first_step)
        self._outputs_function = graph_function(self._run_step)
        self._reduction_function = graph_function(self._reduce)
        self._remaining_steps_function = graph_function(self._run_remaining_steps)

    def trace(self, iterator: Iterator[object], state: object) -> None:
        """Traces all graphs that an evaluation with this iterator and state needs.

        Nothing runs.

        Raises:
          NotInGraph: when one of them cannot be traced.
        """
        # The task's own code may raise anything where it meets tensors without values.
        try:
            if state is None:
                first = self._first_step_function.get_concrete_function(iterator)
            else:
                first = self._outputs_function.get_concrete_function(iterator)

            # A graph that was traced before does not set the specs again.
            outputs = self._output_specs_by_graph.setdefault(first.graph, self._output_specs)
            initial = first.structured_outputs if state is None else _tensors(state)
            spec = self._generalize_specs(_specs(initial), outputs)

            number = tf.TensorSpec([], tf.int32)
            self._remaining_steps_function.get_concrete_function(iterator, number, number, spec)
        except Exception as error:
            raise NotInGraph(_reason(error)) from error

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph that contains the first step. None before the first trace."""
        return next(reversed(self._output_specs_by_graph), None)

    def __call__(self, iterator: Iterator[object], limit: int, state: object) -> tuple[int, object]:
        """Returns the number of steps done and the state, as eager tensors.

        Args:
          iterator: An iterator over the data.
          limit: The largest number of steps. -1 means all of the data.
          state: The initial state. With None, the first step creates it.
        """
        done = 0
        if limit == 0 or self._stop.numpy():
            return done, state

        # The first step also creates the state.
        if state is None:
            try:
                state = self._first_step_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return done, state
            done = 1
        if done == limit:
            return done, state

        count, state = self._remaining_steps_function(
            iterator, tf.constant(limit), tf.constant(done), _tensors(state)
        )
        return int(count), state

    def _first_step(self, iterator: Iterator[object]) -> Any:
        outputs = self._run_step(iterator)
        return self._reduce(None, outputs)

    def _run_remaining_steps(
        self, iterator: tf.data.Iterator, limit: tf.Tensor, done: tf.Tensor, state: object
    ) -> tuple[tf.Tensor, object]:
        def one_step(element: SingleElementIterator, flat: list[tf.Tensor]) -> list[tf.Tensor]:
            outputs = self._run_step(element)
            state_now = tf.nest.pack_sequence_as(state, flat, expand_composites=True)
            next_state = self._reduce(state_now, outputs)
            return tf.nest.flatten(next_state, expand_composites=True)

        # The loop in graph takes its state as a flat list of tensors.
        flat = tf.nest.flatten(state, expand_composites=True)
        done, flat = loop_over_elements(iterator, limit, self._stop, one_step, flat, done)
        last_state = tf.nest.pack_sequence_as(state, flat, expand_composites=True)
        return done, last_state

    def _reduce(self, state: object, outputs: object) -> Any:
        """Reduces the outputs of one step.

        Runs in graph, on the host, which supports strings and has the memory.

        Raises:
          NotInGraph: when the reduction does more than compute a state from the outputs.
        """
        # The reduction gets its own dicts and lists, which it may change.
        old = tf.nest.flatten(state)
        state = tf.nest.pack_sequence_as(state, old)

        snapshot = AttributeSnapshot(self._watched)
        try:
            with tf.device("CPU:0"):
                new = apply_autograph(self.reduce_fn)(state, outputs)
        finally:
            changed = snapshot.restore()

        # In graph such a change would happen only once, during tracing.
        if changed:
            raise NotInGraph(
                f"the aggregation also changes {', '.join(changed)}, "
                "besides the state that it returns"
            )

        computed = [leaf for leaf in tf.nest.flatten(new) if tf.is_tensor(leaf)]
        if all(any(leaf is before for before in old) for leaf in computed):
            raise NotInGraph(
                "the state that the aggregation returns holds no tensor "
                "that is computed from the logs"
            )
        return _tensors(new)

    def _run_step(self, iterator: Iterator[object]) -> Any:
        """Returns the outputs of a step as a tf.function would return them.

        Remembers the specs of the outputs.
        """

        def as_tensor(leaf: object) -> Any:
            if leaf is None or tf.is_tensor(leaf):
                return leaf
            return tf.convert_to_tensor(leaf)

        step_outputs = run_one_step(self._steps, iterator)
        outputs = tf.nest.map_structure(as_tensor, step_outputs)
        self._output_specs = _specs(outputs)
        return outputs

    def _generalize_specs(self, spec: NestedSpec, outputs: NestedSpec) -> NestedSpec:
        """Returns the specs of the state. Every dimension that a reduction changes is left open."""
        while True:
            reduction = self._reduction_function.get_concrete_function(spec, outputs)
            after = _specs(reduction.structured_outputs)
            common = _merge_specs(spec, after)

            # The specs are general enough when one more reduction does not change them.
            if common == spec:
                return spec
            spec = common


def _reason(error: Exception) -> str:
    """Returns the last line of a message.

    AutoGraph puts the error below its stack of places.
    """
    message = str(error).strip()
    lines = message.splitlines()
    last_line = lines[-1].strip() if lines else ""
    kind = f"{type(error).__name__}: "
    text = last_line.removeprefix(kind)
    return text if isinstance(error, NotInGraph) else kind + text


def _merge_specs(spec: NestedSpec, other: NestedSpec) -> NestedSpec:
    """Returns the specs that both states fit."""
    try:
        tf.nest.assert_same_structure(spec, other)
    except (ValueError, TypeError) as error:
        raise NotInGraph("the state changes its structure from step to step") from error

    leaves = []
    for before, after in zip(tf.nest.flatten(spec), tf.nest.flatten(other), strict=True):
        leaf = before.most_specific_common_supertype([after])
        if leaf is None:
            raise NotInGraph(
                f"a part of the state is {before} after one step and {after} after the next"
            )
        leaves.append(leaf)
    return tf.nest.pack_sequence_as(spec, leaves)


def _tensors(state: object) -> Any:
    """Returns the state with arrays and whole numbers converted to tensors.

    Raises:
      NotInGraph: for values that a tensor does not represent exactly. These are strings, and
        floats, which would lose half their bits.
    """

    def as_tensor(leaf: object) -> Any:
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
            return leaf
        if isinstance(leaf, (int, np.ndarray, np.number, np.bool_)):
            return tf.convert_to_tensor(leaf)
        raise NotInGraph(f"the state holds a {type(leaf).__name__}, and a graph needs tensors")

    return tf.nest.map_structure(as_tensor, state)


def _specs(values: object) -> NestedSpec:
    """Returns the spec of each tensor in nested values. None stays None."""

    def get_spec(leaf: object) -> tf.TypeSpec | None:
        if leaf is None:
            return None
        return tf.type_spec_from_value(leaf)

    return tf.nest.map_structure(get_spec, values)


class EvaluationHooks(Protocol):
    """An object whose methods an evaluation calls before and after each batch.

    They are called eagerly, on the host.
    """

    def begin(self, batch: int) -> None:
        """Called before a batch with its number, counted from 0.

        Where the length of the data is not known, it is also called before the end of the data is
        found.
        """
        ...

    def end(self, batch: int, results: dict[str, Any]) -> bool:
        """Called after a part of an evaluation.

        Args:
          batch: The number of the last batch of the part.
          results: The results so far, as NumPy values.

        Returns:
          Whether the evaluation continues.
        """
        ...


class EvalLoop:
    """Runs evaluation steps in graph until the data ends.

    It ends earlier when enough steps are done, or when a stop is requested. On small models it is
    four to five times as fast as a Python loop. Call it eagerly, on the host.

    Args:
      steps: What the loop runs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.
      one_thread: Whether the loop runs on one thread, for which its graph is checked. See
        `check_one_thread`.

    Attributes:
      reset: Resets the metrics, in a separate call.
    """

    def __init__(
        self,
        steps: LoopSteps,
        stop: tf.Variable,
        *,
        reset_metrics: bool = True,
        one_thread: bool = False,
    ) -> None:
        self._steps = steps
        self._stop = stop
        self._resets_metrics = reset_metrics
        self.reset = graph_function(steps.reset)
        self._results = Readback(steps.results, graph_function)

        check = check_one_thread if one_thread else None
        self._loop_function = LoopFunction(self._run_loop, "the evaluation loop", check=check)

    def __call__(self, iterator: Iterator[object], num_steps: IntLike) -> tuple[int, Any]:
        """Returns the number of steps done and the results, as NumPy values.

        Args:
          iterator: An iterator over the data.
          num_steps: The largest number of steps, an integer scalar. -1 means all of the data.
        """
        packed = self._loop_function(iterator, as_int32(num_steps))
        results, (done,) = self._results.unpack(packed)
        return int(done), results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop. None before the first trace."""
        return self._loop_function.newest_graph

    def _run_loop(self, iterator: tf.data.Iterator, num_steps: tf.Tensor) -> Packed:
        def one_step(element: SingleElementIterator, no_state: list[tf.Tensor]) -> list[tf.Tensor]:
            run_one_step(self._steps, element)
            return no_state

        if self._resets_metrics:
            self._steps.reset()
        done, _ = loop_over_elements(iterator, num_steps, self._stop, one_step)
        return self._results.pack(done)


class StatefulEvalLoop:
    """Runs evaluation steps and reduces their outputs to a state.

    It runs step by step in Python, or in one graph.

    Args:
      steps: What the loop runs. A step returns its outputs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.
      use_tf_function: Whether to compile the step.
      use_tf_while_loop: Whether to run the loop and the reduction in graph. If they cannot be
        traced, which is known before the first step runs, one warning says why, and this and later
        evaluations run step by step. Errors in the reduction are then raised unchanged.
      watched: Objects whose attributes the reduction might change. In graph such a change would
        happen only once, during tracing.
    """

    def __init__(
        self,
        steps: LoopSteps,
        stop: tf.Variable,
        *,
        reset_metrics: bool = True,
        use_tf_function: bool = True,
        use_tf_while_loop: bool = False,
        watched: Sequence[object] = (),
    ) -> None:
        self._steps = steps
        self._stop = stop
        self._watched = watched
        self._runs_in_graph = use_tf_while_loop
        self._graph_reduction: GraphReduction | None = None

        step = functools.partial(run_one_step, steps)
        self._step = LoopFunction(step, "the evaluation step") if use_tf_function else step
        self._reset: Any = None
        if reset_metrics:
            self._reset = graph_function(steps.reset) if use_tf_function else steps.reset

    def __call__(
        self, iterator: Iterator[object], num_steps: IntLike, state: object, reduce_fn: Reduce
    ) -> tuple[int, Any]:
        """Returns the number of steps done and the state. Runs eagerly, on the host.

        Args:
          iterator: An iterator over the data.
          num_steps: The largest number of steps. -1 means all of the data.
          state: The initial state. With None, `reduce_fn` creates it from the outputs of the first
            step.
          reduce_fn: A function of state and outputs that returns the new state.
        """
        # The graphs are traced before anything runs, so that a failure leaves the loop in Python.
        reduction = None
        if self._runs_in_graph:
            reduction = self._trace_reduction(iterator, state, reduce_fn)

        if self._reset is not None:
            self._reset()
        if reduction is not None:
            return reduction(iterator, int(num_steps), state)

        limit = int(num_steps)
        done = 0
        while (limit < 0 or done < limit) and not self._stop.numpy():
            try:
                outputs = self._step(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            state = reduce_fn(state, outputs)
            done += 1
        return done, state

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop, or of the step. None if no graph exists."""
        source = self._graph_reduction if self._runs_in_graph else self._step
        return getattr(source, "newest_graph", None)

    def _trace_reduction(
        self, iterator: Iterator[object], state: object, reduce_fn: Reduce
    ) -> GraphReduction | None:
        """Returns the traced reduction. None if it cannot be traced, now and later."""
        # The graphs of an earlier evaluation are used again while its reduction is the same.
        if self._graph_reduction is None or self._graph_reduction.reduce_fn != reduce_fn:
            self._graph_reduction = GraphReduction(
                self._steps, self._stop, reduce_fn, self._watched
            )

        try:
            self._graph_reduction.trace(iterator, state)
        except NotInGraph as reason:
            self._runs_in_graph = False
            _LOG.warning(
                "the evaluation runs step by step, "
                "because its logs cannot be aggregated in a graph: %s; "
                "trainer.eval_tf_while_loop=false silences this warning",
                reason,
            )
            return None
        return self._graph_reduction


class EagerEvalLoop:
    """Runs evaluation steps one by one in Python, and returns the results after them.

    Runs eagerly, on the host.

    Args:
      steps: What the loop runs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.

    Attributes:
      newest_graph: None, since nothing is compiled.
      reset: Resets the metrics, in a separate call.
    """

    newest_graph: tf.Graph | None = None

    def __init__(self, steps: LoopSteps, stop: tf.Variable, *, reset_metrics: bool = True) -> None:
        self.reset = steps.reset
        self._loop = StatefulEvalLoop(
            steps, stop, reset_metrics=reset_metrics, use_tf_function=False
        )
        self._results = Readback(steps.results, eager)

    def __call__(self, iterator: Iterator[object], num_steps: IntLike) -> tuple[int, Any]:
        """Returns the number of steps done and the results. See EvalLoop."""
        done, _ = self._loop(iterator, num_steps, None, lambda state, outputs: None)
        return done, self._results()


class SplitEvalLoop:
    """Runs an evaluation one batch at a time, so that callbacks run between them.

    Runs eagerly, on the host.

    Args:
      loop: A loop that does not reset the metrics by itself.
      hooks: The object to call before and after each batch.
      data: The data, which knows an upper bound of the number of its batches.
    """

    def __init__(
        self, loop: EvalLoop | EagerEvalLoop, hooks: EvaluationHooks, data: ValidationData
    ) -> None:
        self._loop = loop
        self._hooks = hooks
        self._data = data

    def __call__(self, iterator: Iterator[object], num_steps: IntLike) -> tuple[int, Any]:
        """Returns the number of batches evaluated and the results, as NumPy values.

        Args:
          iterator: An iterator over the data.
          num_steps: The largest number of batches. -1 means all of the data.
        """
        self._loop.reset()

        # The limit is None when the number of batches is unknown.
        max_batches = int(num_steps)
        limit = self._data.cardinality() if max_batches < 0 else max_batches
        done = 0
        results: Any = None
        while limit is None or done < limit:
            self._hooks.begin(done)
            count, results = self._loop(iterator, tf.constant(1, tf.int32))
            if count == 0:
                break

            done += 1
            if not self._hooks.end(done - 1, remove_engine_results(results)):
                break

        return done, results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop. None if no graph exists."""
        return self._loop.newest_graph


@contextlib.contextmanager
def explain_end_of_data(section: str) -> Iterator[None]:
    """Raises DataError where a loop of a subclass asks for more batches than the data has.

    Args:
      section: The config's section of the data.
    """
    try:
        yield
    except (tf.errors.OutOfRangeError, StopIteration) as end:
        raise DataError(
            f"{section} has no more batches, but the evaluation loop asked for another one; "
            "set trainer.validation_steps to at most the number of batches"
        ) from end


def check_evaluated_batches(done: int, num_steps: int, was_stopped: bool) -> None:
    """Raises DataError when an evaluation found no batch.

    Warns when it found fewer than `num_steps`.
    """
    if done == 0 and not was_stopped:
        raise DataError(
            "task.validation_data has no batch: "
            "no files, no examples, or fewer examples than one batch"
        )

    if 0 <= done < num_steps and not was_stopped:
        _LOG.warning(
            "the evaluation used %d batches of the %d asked for: the data has no more",
            done,
            num_steps,
        )
