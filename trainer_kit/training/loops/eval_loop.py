"""Evaluation loops: in one graph or step by step, with metrics only or with a state that outputs are added to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.training.loops.eval_reduction import GraphReduction, NotInGraph, Reduce
from trainer_kit.training.loops.host_variables import as_int32
from trainer_kit.training.loops.iterators import over_elements
from trainer_kit.training.loops.loop_results import Readback
from trainer_kit.training.loops.split_eval_loop import EvaluationHooks, SplitEvalLoop
from trainer_kit.training.loops.tracing import LoopFunction, eager, graph_function
from trainer_kit.training.loops.train_loop import Step

_LOG = logging.getLogger(__name__)


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
    """Returns a loop that calls functions around the parts of an evaluation.

    Args:
      parts: The functions.
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
      parts: Functions that are not called, since such an evaluation has no parts; a warning says so.
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
