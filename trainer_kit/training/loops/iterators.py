"""What loops read on the host: iterators over the data, and the flag that ends a loop before its next step."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from trainer_kit.runtime.collectives import all_gather, sum_over_workers, worker_count
from trainer_kit.runtime.determinism import is_op_determinism_enabled

STOP_SYNC_INTERVAL = (
    10  # steps, or batches of an evaluation, after which several workers agree whether to stop
)


def stop_variable() -> tf.Variable:
    """Returns a flag that ends a running loop when it is set: one variable on the host, also in a strategy's scope.

    A strategy would keep it on its GPUs, and each step would wait for a copy of it. The scope of a
    strategy holds for its thread only.
    """

    def create_variable() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(False, trainable=False, name="stop")

    with ThreadPoolExecutor(1) as outside_of_the_scope:
        return outside_of_the_scope.submit(create_variable).result()


def should_continue(stop: tf.Variable, *conditions: tf.Tensor) -> tf.Tensor:
    """Returns whether a loop takes another step: all conditions hold, and no stop is requested.

    Runs in graph, on the host.

    Without a device TensorFlow would compute this on a GPU. Each step would then wait until the GPU
    has done the steps before it and the answer has come back.

    Args:
      stop: The flag of stop_variable.
      *conditions: Boolean scalars.
    """
    with tf.device("CPU:0"):
        result = tf.logical_not(stop)
        for condition in conditions:
            result = tf.logical_and(condition, result)
        return result


def create_boolean_constants() -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the tensors False and True, on the host: creating one per loop call takes as long as a small step."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(False), tf.constant(True)


def as_int32(number: Any) -> tf.Tensor:
    """Returns a number as an int32 scalar; a tensor of that dtype is returned unchanged, since a cast takes 50 us."""
    if isinstance(number, tf.Tensor) and number.dtype == tf.int32:
        return number
    return _constant(number) if type(number) is int else tf.cast(number, tf.int32)


@functools.lru_cache
def _constant(number: int) -> tf.Tensor:
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(number, tf.int32)


def batch_counter() -> tf.Variable:
    """Returns a counter, on the host, that shows another thread the progress of a loop."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")


class StopFlag:
    """The flag that loops in graph check before each step.

    Args:
      strategy: The run's strategy.

    Attributes:
      variable: A bool scalar on the host; loops end when it is True.
      variables: All variables of the flag; checkpoints do not hold them.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.variable, self._local_request = stop_variable(), stop_variable()
        self.variables = [self.variable, self._local_request]
        self._strategy, self._num_workers = strategy, worker_count(strategy)
        self._requested_at: float | None = None

    def request(self) -> None:
        """Ends the running loop before its next step; safe from another thread.

        Several workers end it together, after AGREE_EVERY steps at most. If one worker stopped
        alone, the others would wait for its gradients for ever.
        """
        self._requested_at = self._requested_at or time.monotonic()
        self._local_request.assign(True)
        if self._num_workers == 1:
            self.variable.assign(True)

    @property
    def is_requested(self) -> bool:
        """Whether running loops stop before their next step; the same on all workers."""
        return (
            self._requested_at is not None
            if self._num_workers == 1
            else bool(self.variable.numpy())
        )

    @property
    def seconds_since_request(self) -> float:
        """The seconds since this process was asked to stop; 0 if it was not."""
        return time.monotonic() - self._requested_at if self._requested_at else 0.0

    @property
    def is_agreed(self) -> bool | None:
        """Whether all workers have agreed to stop; None if there is only one worker."""
        return self.is_requested if self._num_workers > 1 else None

    @tf.autograph.experimental.do_not_convert
    def sync_workers(self, count: tf.Variable) -> None:
        """Ends the loop on all workers at the same step if one was asked to stop; runs in graph, after each step.

        Args:
          count: The counter of the steps; the same on all workers.
        """
        if self._num_workers == 1:
            return

        def agree() -> tf.Tensor:
            asked = sum_over_workers(self._strategy, tf.cast(self._local_request, tf.int32))
            self.variable.assign(asked > 0)
            return asked

        tf.cond(tf.equal(count % STOP_SYNC_INTERVAL, 0), agree, lambda: 0)

    def sync_workers_between_loops(self) -> None:
        """Lets all workers stop if one was asked to, for trainers whose loops do not call `agree`; runs eagerly."""
        if self._num_workers > 1:
            requests = all_gather(self._strategy, "stop" if self._requested_at else "continue")
            self.variable.assign("stop" in requests)


def is_stopping(trainer: Any, has_local_request: Callable[[], bool]) -> bool:
    """Whether a run has to stop; with several workers, whether they have agreed to stop. Runs eagerly, on the host.

    Args:
      trainer: The run's trainer, a BaseTrainer.
      has_local_request: A function that returns whether this process was asked to stop in another
        way, such as by a signal.
    """
    agreed = trainer.is_stop_agreed
    return (
        has_local_request() or bool(trainer.is_stop_requested) if agreed is None else bool(agreed)
    )


def create_wait_seconds() -> tf.Tensor:
    """Returns 0 seconds of waiting for data, float64, for a WaitingClock; NaN if op determinism forbids clocks."""
    return tf.constant(math.nan if is_op_determinism_enabled() else 0.0, tf.float64)


def parse_wait_seconds(seconds: float) -> float | None:
    """Returns the seconds that a WaitingClock has added up; None if there was no clock."""
    return None if math.isnan(seconds) else seconds


class TimedIterator:
    """An iterator that adds up the seconds that the loop waits for its elements; runs in graph, on the host.

    It costs a few hundredths of a step of 0.1 ms, and nothing measurable of longer ones. An element
    that is requested inside another graph, of a tf.function, a tf.cond or a loop in the step, is
    not timed: its seconds could not leave that graph.

    Args:
      iterator: An iterator over the data.
      wait_seconds: The seconds so far: `create_wait_seconds`, or the value of the clock before.
      exact: Whether the element waits for the first reading of the clock, which costs 3 % of such a
        step. Otherwise the reading may come some microseconds late; if operations run one after the
        other, at any time.

    Attributes:
      wait_seconds: The seconds so far, including the elements since.
    """

    def __init__(self, iterator: Any, wait_seconds: tf.Tensor, exact: bool = True) -> None:
        self._iterator = iterator
        self.wait_seconds = wait_seconds
        self._exact = exact

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        elsewhere = here is not (
            self.wait_seconds.graph if tf.is_symbolic_tensor(self.wait_seconds) else None
        )
        if elsewhere or is_op_determinism_enabled():
            return next(self._iterator)
        begin = tf.timestamp()
        with tf.control_dependencies([begin] if self._exact else []):
            element = next(self._iterator)
        parts = [
            part
            for part in tf.nest.flatten(element, expand_composites=True)
            if tf.is_symbolic_tensor(part)
        ]
        with (
            tf.control_dependencies(list(dict.fromkeys(part.op for part in parts))),
            tf.device("CPU:0"),
        ):
            self.wait_seconds += tf.timestamp() - begin
        return element

    get_next = __next__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class SingleElementIterator:
    """An iterator over one element, so that steps which call `next(iterator)` run inside the graph's loop.

    A loop inside the step would get the same element each time, because a loop in graph is traced
    once.

    Args:
      element: The element of the data.

    Attributes:
      is_overdrawn: Whether a step asked for more than this element.

    Raises:
      ValueError: when a step asks for a second element; evaluate such a step with
        eval_tf_function=False.
    """

    def __init__(self, element: Any) -> None:
        self._left, self._graph, self.is_overdrawn = (
            [element],
            tf.compat.v1.get_default_graph(),
            False,
        )

    def __iter__(self) -> SingleElementIterator:
        return self

    def __next__(self) -> Any:
        if not self._left or self._is_in_inner_loop():
            self.is_overdrawn = True
            raise ValueError(
                "an evaluation step took two elements from its iterator; set"
                " trainer.eval_tf_function=false"
            )
        return self._left.pop()

    get_next = __next__

    def _is_in_inner_loop(self) -> bool:
        graph = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if type(graph).__name__ == "WhileBodyFuncGraph":
                return True
            graph = getattr(graph, "outer_graph", None)
        return False


def loop_over_elements(
    iterator: Any,
    limit: tf.Tensor,
    stop: tf.Variable,
    step: Callable[[SingleElementIterator, Any], Any],
    state: Sequence[tf.Tensor] = (),
    done: int | tf.Tensor = 0,
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Calls `step(element, state) -> state` until the data ends, enough are done or a stop is requested; runs in graph.

    `get_next_as_optional` ends the loop inside the graph, without an exception, also for ragged
    batches and replicas.

    Args:
      iterator: An iterator over the data.
      limit: The largest number of steps, including those done before; -1 means all of the data.
      stop: The flag of stop_variable.
      step: A function of an iterator over one element, and the state.
      state: Tensors; each keeps its dtype and its static shape.
      done: The number of steps done before.

    Returns:
      The number of steps done, including those before, and the state.
    """

    def go_on(done: tf.Tensor, wanted: tf.Tensor, element: Any, state: Any) -> tf.Tensor:
        return should_continue(stop, element.has_value(), wanted)

    def one_step(done: tf.Tensor, wanted: tf.Tensor, element: Any, state: Any) -> Any:
        with tf.name_scope(
            ""
        ):  # else "while/" would stand before the names of the task's summaries
            state = step(SingleElementIterator(element.get_value()), state)
        wanted = tf.not_equal(done + 1, limit)
        # A branch around the step itself would cost more than a small step.
        return (
            done + 1,
            wanted,
            tf.cond(wanted, iterator.get_next_as_optional, lambda: element),
            state,
        )

    done, state = tf.convert_to_tensor(done), list(state)
    values = (done, tf.not_equal(done, limit), iterator.get_next_as_optional(), state)
    shapes = (None, None, None, [tensor.shape for tensor in state])
    done, _, _, state = tf.while_loop(go_on, one_step, values, shapes)
    return done, state
