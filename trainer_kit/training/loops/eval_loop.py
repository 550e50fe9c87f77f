"""Evaluation loops: in one graph or step by step, with metrics only or with a state that outputs are added to.

A graph has to know structure, dtypes and shapes of the state before it runs. So the first step, which creates the
state, has its own graph. The specs that it returns, and those after one more reduction, show which dimensions grow:
these are left open. Nothing runs while the graphs are traced.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.inputs.autograph import converted
from trainer_kit.training.loops.iterators import OneElement, as_int32, over_elements
from trainer_kit.training.loops.tracing import LoopFunction, Readback, eager, graph_function
from trainer_kit.training.loops.train_loop import Step

_LOG = logging.getLogger(__name__)
_LARGE = 1000  # containers with more items are not searched for nested ones: they are data, not an aggregated state
_ABSENT: Any = object()
Reduce = Callable[[Any, Any], Any]
Part = Callable[[Any, tf.Tensor], tuple[int, Any]]


class SideEffects:
    """Remembers the attributes of objects, and the contents of the lists, dicts and sets in them, also nested ones.

    Args:
      objects: The objects whose attributes are remembered.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._attributes = [(one, dict(vars(one))) for one in objects]
        self._contents = [(*found, _items(found[1])) for one in objects for found in _containers(one)]

    def restore(self) -> list[str]:
        """Undoes all changes since, and returns the names of the changed attributes."""
        changed = [name for one, before in self._attributes for name in _put_back(one, before)]
        for name, container, before in self._contents:
            if not _same(_items(container), before):
                changed.append(name)
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        return sorted(set(changed))


def _put_back(one: Any, before: dict[str, Any]) -> list[str]:
    """Restores changed attributes one by one, since other threads may read them; returns their names."""
    now = vars(one)
    names = [name for name in {*now, *before} if now.get(name, _ABSENT) is not before.get(name, _ABSENT)]
    for name in names:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return [f"{type(one).__name__}.{name}" for name in names]


def _containers(one: Any) -> Iterator[tuple[str, Any]]:
    """Yields every container in the attributes, once, with the name of its attribute."""
    seen: set[int] = set()
    left = [(f"{type(one).__name__}.{name}", value) for name, value in vars(one).items()]
    while left:
        name, value = left.pop()
        if not isinstance(value, (list, dict, set, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            yield name, value
        if len(value) <= _LARGE:
            left += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects; by identity, since the objects may not be comparable."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


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


class EvaluationHooks(Protocol):
    """An object whose methods an evaluation calls before and after each part, eagerly, on the host.

    Attributes:
      steps: The number of batches in a part.
    """

    steps: int

    def begin(self, batch: int) -> None:
        """Called before a part with the number of its first batch, counted from 0.

        Where the length of the data is not known, it is also called before the end of the data is found.
        """
        ...

    def end(self, batch: int, results: dict[str, Any]) -> bool:
        """Called after a part with the number of its last batch and the results so far, as NumPy values.

        Returns whether the evaluation goes on.
        """
        ...


class SplitEvalLoop:
    """Runs an evaluation a few batches at a time, so that callbacks run between them. Runs eagerly, on the host.

    Args:
      reset: A function that resets the metrics.
      part: A function of an iterator and the number of batches, int32, which evaluates that many without resetting the
        metrics. It returns the number of batches that it has evaluated and the results so far.
      parts: The object to call before and after each part.
      batches: A function that returns an upper bound of the number of batches in the data, or None if it is not known.
    """

    def __init__(
        self, reset: Callable[[], None], part: Part, parts: EvaluationHooks, batches: Callable[[], int | None]
    ) -> None:
        self._reset, self._part, self._parts, self._batches = reset, part, parts, batches

    def __call__(self, iterator: Any, num_steps: Any) -> tuple[int, Any]:
        """Returns the number of batches evaluated and the results; `num_steps` -1 means all of the data."""
        self._reset()
        done, results, given = 0, None, int(num_steps)
        limit = self._batches() if given < 0 else given
        while limit is None or done < limit:
            wanted = self._parts.steps if limit is None else min(self._parts.steps, limit - done)
            self._parts.begin(done)
            count, results = self._part(iterator, tf.constant(wanted, tf.int32))
            done += count
            goes_on = count > 0 and self._parts.end(done - 1, results)
            if count < wanted or not goes_on:
                break
        return done, results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop of a part; None if there is none."""
        return getattr(self._part, "newest_graph", None)


class EvalLoop:
    """Runs evaluation steps in graph until the data ends, enough steps are done, or a stop is requested.

    On small models it is four to five times as fast as a Python loop.

    Args:
      begin: A function that resets the metrics; called first, in graph.
      step: A function of the iterator that evaluates one batch.
      results: A function that returns nested scalars and tensors after the last step.
      stop: The flag of stop_variable.
      check: A function that raises an error when a traced graph cannot be used.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        step: Step,
        results: Callable[[], Any],
        stop: tf.Variable,
        check: Callable[[tf.Graph], None] = lambda graph: None,
    ) -> None:
        self._results = Readback(results, graph_function)
        whole = self._graph(begin, step, self._results.pack, stop)
        self._whole = LoopFunction(whole, "the evaluation loop", check=check)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> tuple[int, Any]:
        """Returns the number of steps done and the results; `num_steps` -1 means all of the data."""
        results, (done,) = self._results.unpack(self._whole(iterator, as_int32(num_steps)))
        return int(done), results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop; None before the first trace."""
        return self._whole.newest_graph

    @staticmethod
    def _graph(begin: Callable[[], None], step: Step, results: Callable[..., Any], stop: tf.Variable) -> Any:
        def loop(iterator: Any, num_steps: tf.Tensor) -> Any:
            def one_step(element: Any, no_state: Any) -> Any:
                step(element)
                return no_state

            begin()
            done, _ = over_elements(iterator, num_steps, stop, one_step)
            return results(done)

        return loop


class StatefulEvalLoop:
    """Runs evaluation steps and reduces their outputs to a state, step by step in Python or in one graph.

    Args:
      begin: A function that resets the metrics; called first.
      step: A function of the iterator that returns the step's outputs.
      stop: The flag of stop_variable.
      use_tf_function: Whether to compile the step.
      in_graph: Whether to run the loop and the reduction in graph. If they cannot be traced, which is known before the
        first step runs, one warning says why, and this and later evaluations run step by step. Errors in the reduction
        are then raised unchanged.
      watched: Objects whose attributes the reduction might change; in graph such a change would happen only once,
        during tracing.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        step: Step,
        stop: tf.Variable,
        *,
        use_tf_function: bool = True,
        in_graph: bool = False,
        watched: Sequence[Any] = (),
    ) -> None:
        compiled = graph_function if use_tf_function else eager
        self._begin, self._stop = compiled(begin), stop
        self._step = LoopFunction(step, "the evaluation step") if use_tf_function else step
        self._in_graph = in_graph
        self._make_graph = lambda reduce_fn: GraphReduction(step, stop, reduce_fn, watched)
        self._graph: GraphReduction | None = None

    def __call__(self, iterator: Any, num_steps: Any, state: Any, reduce_fn: Reduce) -> tuple[int, Any]:
        """Returns the number of steps done and the state; runs eagerly, on the host.

        Args:
          iterator: An iterator over the data.
          num_steps: The largest number of steps; -1 means all of the data.
          state: The initial state; None: `reduce_fn` creates it from the outputs of the first step.
          reduce_fn: A function of state and outputs that returns the new state.
        """
        graph = self._traced(iterator, state, reduce_fn) if self._in_graph else None
        self._begin()
        if graph is not None:
            return graph(iterator, int(num_steps), state)
        return self._by_step(iterator, int(num_steps), state, reduce_fn)

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the loop, or of the step; None if there is none."""
        return getattr(self._graph if self._in_graph else self._step, "newest_graph", None)

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

    def _traced(self, iterator: Any, state: Any, reduce_fn: Reduce) -> GraphReduction | None:
        if self._graph is None or self._graph.reduce_fn != reduce_fn:
            self._graph = self._make_graph(reduce_fn)
        try:
            self._graph.trace(iterator, state)
        except NotInGraph as reason:
            self._in_graph = False
            _LOG.warning(
                "the evaluation runs step by step, because its logs cannot be aggregated in a graph: %s; "
                "trainer.eval_tf_while_loop=false silences this warning",
                reason,
            )
            return None
        return self._graph


class ResultsByStep:
    """Runs evaluation steps one by one in Python, resets nothing, and returns the results after them. Runs eagerly.

    Args:
      step: A function of the iterator.
      results: A function that returns nested scalars and tensors.
      stop: The flag of stop_variable.
    """

    def __init__(self, step: Step, results: Callable[[], Any], stop: tf.Variable) -> None:
        self._loop = StatefulEvalLoop(lambda: None, step, stop, use_tf_function=False)
        self._results = Readback(results, eager)

    def __call__(self, iterator: Any, num_steps: tf.Tensor) -> tuple[int, Any]:
        """Returns the number of steps done and the results; see EvalLoop."""
        done, _ = self._loop(iterator, num_steps, None, lambda state, outputs: None)
        return done, self._results()


def in_parts(
    parts: EvaluationHooks,
    metrics: Any,
    step: Step,
    stop: tf.Variable,
    batches: Callable[[], int | None],
    *,
    compiled: bool,
    check: Callable[[tf.Graph], None],
) -> SplitEvalLoop:
    """Returns a loop that calls an object around the parts of an evaluation.

    Args:
      parts: The object.
      metrics: The MetricSet of the evaluation.
      step: A function of the iterator.
      stop: The flag of stop_variable.
      batches: Returns an upper bound of the number of batches in the data; None: it is not known.
      compiled: Whether the steps run in graph.
      check: See EvalLoop.
    """
    if not compiled:
        return SplitEvalLoop(metrics.reset, ResultsByStep(step, metrics.results, stop), parts, batches)
    part = EvalLoop(lambda: None, step, metrics.results, stop, check)
    return SplitEvalLoop(graph_function(metrics.reset), part, parts, batches)


def with_state(
    loop: StatefulEvalLoop, ended: Callable[[int, Any, Any], None], parts: EvaluationHooks | None = None
) -> Callable[..., Any]:
    """Returns a function of (iterator, num_steps, state, reduce_fn) that returns the state.

    Args:
      loop: The loop.
      ended: Called with the number of steps done, the number asked for, and the newest graph; None if there is none.
      parts: Hooks that are not called, since such an evaluation has no parts; a warning says so.
    """
    if parts is not None:
        _LOG.warning("methods of evaluation batches are not called: the task aggregates the logs of an evaluation")

    def loop_fn(iterator: Any, num_steps: Any, state: Any, reduce_fn: Any) -> Any:
        done, state = loop(iterator, num_steps, state, reduce_fn)
        ended(done, num_steps, loop.newest_graph)
        return state

    return loop_fn


def without_state(
    loop: EvalLoop | StatefulEvalLoop | SplitEvalLoop,
    keep: Callable[[Any], None],
    ended: Callable[[int, Any, Any], None],
) -> Callable[..., None]:
    """Returns `loop_fn(iterator, num_steps)`.

    Args:
      loop: The loop.
      keep: Called with the results, if the loop has read them.
      ended: See `with_state`.
    """

    def loop_fn(iterator: Any, num_steps: Any) -> None:
        if isinstance(loop, StatefulEvalLoop):
            done, _ = loop(iterator, num_steps, None, lambda state, outputs: None)
        else:
            done, results = loop(iterator, num_steps)
            keep(results)
        ended(done, num_steps, loop.newest_graph)

    return loop_fn


@contextlib.contextmanager
def reporting_end(section: str) -> Iterator[None]:
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


def check_evaluated(done: int, wanted: int, stopped: bool) -> None:
    """Raises DataError when an evaluation found no batch; warns when it found fewer than `wanted`."""
    if done == 0 and not stopped:
        raise DataError("task.validation_data has no batch: no files, no examples, or fewer examples than one batch")
    if 0 <= done < wanted and not stopped:
        _LOG.warning("the evaluation used %d batches of the %d asked for: the data has no more", done, wanted)
