"""Evaluation loops: in one graph or step by step, with metrics only or with a state that outputs are added to.

A graph has to know structure, dtypes and shapes of the state before it runs. So the first step,
which creates the state, has its own graph. The specs that it returns, and those after one more
reduction, show which dimensions grow: these are left open. Nothing runs while the graphs are
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
    Readback,
    check_one_thread,
    eager,
    graph_function,
)
from trainer_kit.training.loops.train_loop import LoopSteps
from trainer_kit.training.metric_set import remove_engine_results

_LOG = logging.getLogger(__name__)
# Containers with more items are not searched for nested ones: they are data, not an aggregated
# state
_LARGE = 1000
_ABSENT: Any = object()
Reduce = Callable[[Any, Any], Any]


@tf.autograph.experimental.do_not_convert
def run_one_step(steps: LoopSteps, iterator: Any) -> Any:
    """Runs a step and what follows it, and returns the outputs of the step; runs in graph or eagerly."""
    outputs = apply_autograph(steps.step)(iterator)
    steps.after_step()
    return outputs


class AttributeSnapshot:
    """Remembers the attributes of objects, and the contents of the lists, dicts and sets in them, also nested ones.

    Args:
      objects: The objects whose attributes are remembered.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._attributes = [(one, dict(vars(one))) for one in objects]
        self._contents = [
            (*found, _items(found[1])) for one in objects for found in _containers(one)
        ]

    def restore(self) -> list[str]:
        """Undoes all changes since, and returns the names of the changed attributes."""
        changed = [
            name for one, before in self._attributes for name in _restore_attributes(one, before)
        ]
        for name, container, before in self._contents:
            if not _has_same_items(_items(container), before):
                changed.append(name)
                container.clear()
                (
                    container.extend(before)
                    if isinstance(container, list)
                    else container.update(before)
                )
        return sorted(set(changed))


def _restore_attributes(item: Any, before: dict[str, Any]) -> list[str]:
    """Restores changed attributes one by one, since other threads may read them; returns their names."""
    now = vars(item)
    names = [
        name for name in {*now, *before} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)
    ]
    for name in names:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return [f"{type(item).__name__}.{name}" for name in names]


def _containers(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields every container in the attributes, once, with the name of its attribute."""
    seen: set[int] = set()
    left = [(f"{type(item).__name__}.{name}", value) for name, value in vars(item).items()]
    while left:
        name, value = left.pop()
        if not isinstance(value, (list, dict, set, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            yield name, value
        if len(value) <= _LARGE:
            left += [
                (name, item) for item in (value.values() if isinstance(value, dict) else value)
            ]


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _has_same_items(container: Any, other: Any) -> bool:
    """Whether two containers hold the same objects; by identity, since the objects may not be comparable."""
    if isinstance(container, dict):
        return container.keys() == other.keys() and all(
            container[key] is other[key] for key in container
        )
    return len(container) == len(other) and all(
        a is b for a, b in zip(container, other, strict=True)
    )


class NotInGraph(Exception):
    """A reduction cannot be part of a graph; the message says why."""


class GraphReduction:
    """Runs evaluation steps in graph until the data ends, enough are done, or a stop is requested; returns a state.

    Args:
      steps: What the loop runs; a step returns outputs.
      stop: The flag of stop_variable.
      reduce_fn: A function of state and outputs that returns the new state; runs on the host.
        Without an initial state, its state is None for the first step.
      watched: Objects whose attributes `reduce_fn` must not change.

    Attributes:
      reduce_fn: The argument of this name.
    """

    def __init__(
        self, steps: LoopSteps, stop: tf.Variable, reduce_fn: Reduce, watched: Sequence[Any] = ()
    ) -> None:
        self.reduce_fn = reduce_fn
        self._steps = steps
        self._stop = stop
        self._watched = watched
        self._output_specs: Any = None  # specs of the outputs of a step, from the last trace
        self._output_specs_by_graph: dict[tf.Graph, Any] = {}  # the same, of the step in each graph
        self._first_step_function = graph_function(self._first_step)
        self._outputs_function = graph_function(self._run_step)
        self._reduction_function = graph_function(self._reduce)
        self._remaining_steps_function = graph_function(self._run_remaining_steps)

    def trace(self, iterator: Any, state: Any) -> None:
        """Traces all graphs that an evaluation with this iterator and state needs; runs nothing.

        Raises:
          NotInGraph: when one of them cannot be traced.
        """
        try:
            first = (
                self._first_step_function if state is None else self._outputs_function
            ).get_concrete_function(iterator)
            outputs = self._output_specs_by_graph.setdefault(first.graph, self._output_specs)
            spec = self._generalize_specs(
                _specs(first.structured_outputs if state is None else _tensors(state)), outputs
            )
            self._remaining_steps_function.get_concrete_function(
                iterator, tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.int32), spec
            )
        except (
            Exception
        ) as error:  # whatever the task's own code raises where it meets tensors without values
            raise NotInGraph(_reason(error)) from error

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph that holds the first step; None before the first trace."""
        return next(reversed(self._output_specs_by_graph), None)

    def __call__(self, iterator: Any, limit: int, state: Any) -> tuple[int, Any]:
        """Returns the number of steps done and the state, as eager tensors; `limit` -1 means all of the data."""
        done = 0
        if limit == 0 or self._stop.numpy():
            return done, state
        if state is None:
            try:
                state, done = self._first_step_function(iterator), 1
            except (StopIteration, tf.errors.OutOfRangeError):
                return done, state
        if done == limit:
            return done, state
        count, state = self._remaining_steps_function(
            iterator, tf.constant(limit), tf.constant(done), _tensors(state)
        )
        return int(count), state

    def _first_step(self, iterator: Any) -> Any:
        return self._reduce(None, self._run_step(iterator))

    def _run_remaining_steps(
        self, iterator: Any, limit: tf.Tensor, done: tf.Tensor, state: Any
    ) -> Any:
        def one_step(element: SingleElementIterator, flat: Any) -> Any:
            outputs = self._run_step(element)
            state_now = tf.nest.pack_sequence_as(state, flat, expand_composites=True)
            return tf.nest.flatten(self._reduce(state_now, outputs), expand_composites=True)

        flat = tf.nest.flatten(state, expand_composites=True)
        done, flat = loop_over_elements(iterator, limit, self._stop, one_step, flat, done)
        return done, tf.nest.pack_sequence_as(state, flat, expand_composites=True)

    def _reduce(self, state: Any, outputs: Any) -> Any:
        """Reduces the outputs of one step; runs in graph, on the host, which supports strings and has the memory."""
        old = tf.nest.flatten(state)
        state = tf.nest.pack_sequence_as(state, old)  # its own dicts and lists, which it may change
        kept = AttributeSnapshot(self._watched)
        try:
            with tf.device("CPU:0"):
                new = apply_autograph(self.reduce_fn)(state, outputs)
        finally:
            changed = kept.restore()
        return self._check_reduced_state(old, new, changed)

    def _check_reduced_state(self, old: Sequence[Any], state: Any, changed: Sequence[str]) -> Any:
        if changed:
            raise NotInGraph(
                f"the aggregation also changes {', '.join(changed)}, besides the state that it"
                " returns"
            )
        computed = [leaf for leaf in tf.nest.flatten(state) if tf.is_tensor(leaf)]
        if all(any(leaf is before for before in old) for leaf in computed):
            raise NotInGraph(
                "the state that the aggregation returns holds no tensor that is computed from the"
                " logs"
            )
        return _tensors(state)

    def _run_step(self, iterator: Any) -> Any:
        """Returns the outputs of a step as a tf.function would return them, and remembers their specs."""
        outputs = tf.nest.map_structure(
            lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
            run_one_step(self._steps, iterator),
        )
        self._output_specs = _specs(outputs)
        return outputs

    def _generalize_specs(self, spec: Any, outputs: Any) -> Any:
        """Returns the specs of the state, with every dimension left open that a reduction changes."""
        while True:
            after = _specs(
                self._reduction_function.get_concrete_function(spec, outputs).structured_outputs
            )
            common = _merge_specs(spec, after)
            if common == spec:
                return spec
            spec = common


def _reason(error: Exception) -> str:
    """Returns the last line of a message: AutoGraph puts the error itself below its stack of places."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kind = f"{type(error).__name__}: "
    text = lines[-1].removeprefix(kind)
    return text if isinstance(error, NotInGraph) else kind + text


def _merge_specs(spec: Any, other: Any) -> Any:
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


def _tensors(state: Any) -> Any:
    """Returns the state with arrays and whole numbers converted to tensors.

    Raises:
      NotInGraph: for values that a tensor does not hold exactly: strings, and floats, which would
        lose half their bits.
    """

    def tensor(leaf: Any) -> Any:
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable):
            return leaf
        if isinstance(leaf, (int, np.ndarray, np.number, np.bool_)):
            return tf.convert_to_tensor(leaf)
        raise NotInGraph(f"the state holds a {type(leaf).__name__}, and a graph needs tensors")

    return tf.nest.map_structure(tensor, state)


def _specs(values: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), values
    )


class EvaluationHooks(Protocol):
    """An object whose methods an evaluation calls before and after each batch, eagerly, on the host."""

    def begin(self, batch: int) -> None:
        """Called before a batch with its number, counted from 0.

        Where the length of the data is not known, it is also called before the end of the data is
        found.
        """
        ...

    def end(self, batch: int, results: dict[str, Any]) -> bool:
        """Called after a part with the number of its last batch and the results so far, as NumPy values.

        Returns whether the evaluation goes on.
        """
        ...


class EvalLoop:
    """Runs evaluation steps in graph until the data ends, enough steps are done, or a stop is requested.

    On small models it is four to five times as fast as a Python loop.

    Args:
      steps: What the loop runs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.
      one_thread: Whether the loop runs on one thread, for which its graph is checked; see
        `check_one_thread`.

    Attributes:
      reset: Resets the metrics, in a call of its own.
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

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> tuple[int, Any]:
        """Returns the number of steps done and the results; `num_steps` -1 means all of the data."""
        results, (done,) = self._results.unpack(self._loop_function(iterator, as_int32(num_steps)))
        return int(done), results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop; None before the first trace."""
        return self._loop_function.newest_graph

    def _run_loop(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        def one_step(element: Any, no_state: Any) -> Any:
            run_one_step(self._steps, element)
            return no_state

        if self._resets_metrics:
            self._steps.reset()
        done, _ = loop_over_elements(iterator, num_steps, self._stop, one_step)
        return self._results.pack(done)


class StatefulEvalLoop:
    """Runs evaluation steps and reduces their outputs to a state, step by step in Python or in one graph.

    Args:
      steps: What the loop runs; a step returns its outputs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.
      use_tf_function: Whether to compile the step.
      use_tf_while_loop: Whether to run the loop and the reduction in graph. If they cannot be
        traced, which is known before the first step runs, one warning says why, and this and later
        evaluations run step by step. Errors in the reduction are then raised unchanged.
      watched: Objects whose attributes the reduction might change; in graph such a change would
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
        watched: Sequence[Any] = (),
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
        self, iterator: Any, num_steps: Any, state: Any, reduce_fn: Reduce
    ) -> tuple[int, Any]:
        """Returns the number of steps done and the state; runs eagerly, on the host.

        Args:
          iterator: An iterator over the data.
          num_steps: The largest number of steps; -1 means all of the data.
          state: The initial state; None: `reduce_fn` creates it from the outputs of the first step.
          reduce_fn: A function of state and outputs that returns the new state.
        """
        graph = self._trace_reduction(iterator, state, reduce_fn) if self._runs_in_graph else None
        if self._reset is not None:
            self._reset()
        if graph is not None:
            return graph(iterator, int(num_steps), state)
        return self._by_step(iterator, int(num_steps), state, reduce_fn)

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop, or of the step; None if there is none."""
        return getattr(
            self._graph_reduction if self._runs_in_graph else self._step, "newest_graph", None
        )

    def _by_step(self, iterator: Any, limit: int, state: Any, reduce_fn: Reduce) -> tuple[int, Any]:
        done = 0
        while (limit < 0 or done < limit) and not self._stop.numpy():
            try:
                outputs = self._step(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            state = reduce_fn(state, outputs)
            done += 1
        return done, state

    def _trace_reduction(
        self, iterator: Any, state: Any, reduce_fn: Reduce
    ) -> GraphReduction | None:
        if self._graph_reduction is None or self._graph_reduction.reduce_fn != reduce_fn:
            self._graph_reduction = GraphReduction(
                self._steps, self._stop, reduce_fn, self._watched
            )
        try:
            self._graph_reduction.trace(iterator, state)
        except NotInGraph as reason:
            self._runs_in_graph = False
            _LOG.warning(
                "the evaluation runs step by step, because its logs cannot be aggregated in a"
                " graph: %s; trainer.eval_tf_while_loop=false silences this warning",
                reason,
            )
            return None
        return self._graph_reduction


class EagerEvalLoop:
    """Runs evaluation steps one by one in Python, and returns the results after them. Runs eagerly, on the host.

    Args:
      steps: What the loop runs.
      stop: The flag of stop_variable.
      reset_metrics: Whether the metrics are reset first.

    Attributes:
      newest_graph: None, since nothing is compiled.
      reset: Resets the metrics, in a call of its own.
    """

    newest_graph: tf.Graph | None = None

    def __init__(self, steps: LoopSteps, stop: tf.Variable, *, reset_metrics: bool = True) -> None:
        self.reset = steps.reset
        self._loop = StatefulEvalLoop(
            steps, stop, reset_metrics=reset_metrics, use_tf_function=False
        )
        self._results = Readback(steps.results, eager)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> tuple[int, Any]:
        """Returns the number of steps done and the results; see EvalLoop."""
        done, _ = self._loop(iterator, num_steps, None, lambda state, outputs: None)
        return done, self._results()


class SplitEvalLoop:
    """Runs an evaluation one batch at a time, so that callbacks run between them. Runs eagerly, on the host.

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

    def __call__(self, iterator: Any, num_steps: Any) -> tuple[int, Any]:
        """Returns the number of batches evaluated and the results; `num_steps` -1 means all of the data."""
        self._loop.reset()
        done = 0
        results: Any = None
        limit = self._data.cardinality() if int(num_steps) < 0 else int(num_steps)
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
        """The newest graph of the loop; None if there is none."""
        return self._loop.newest_graph


@contextlib.contextmanager
def explain_end_of_data(section: str) -> Iterator[None]:
    """Raises DataError where a loop that a subclass makes asks for more batches than the data has.

    Args:
      section: The config's section of the data.
    """
    try:
        yield
    except (tf.errors.OutOfRangeError, StopIteration) as end:
        raise DataError(
            f"{section} has no more batches, but the evaluation loop asked for another one; set "
            "trainer.validation_steps to at most the number of batches"
        ) from end


def check_evaluated_batches(done: int, num_steps: int, was_stopped: bool) -> None:
    """Raises DataError when an evaluation found no batch; warns when it found fewer than `num_steps`."""
    if done == 0 and not was_stopped:
        raise DataError(
            "task.validation_data has no batch: no files, no examples, or fewer examples than one"
            " batch"
        )
    if 0 <= done < num_steps and not was_stopped:
        _LOG.warning(
            "the evaluation used %d batches of the %d asked for: the data has no more",
            done,
            num_steps,
        )
