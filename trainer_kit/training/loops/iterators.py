"""What loops read on the host: iterators over the data, and the flag that ends a loop."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.runtime.collectives import all_gather, sum_over_workers, worker_count
from trainer_kit.runtime.determinism import is_op_determinism_enabled
from trainer_kit.typing import IntLike

if TYPE_CHECKING:
    from trainer_kit.training.base_trainer import BaseTrainer

# The steps, or batches of an evaluation, after which several workers agree whether to stop.
STOP_SYNC_INTERVAL = 10


def stop_variable() -> tf.Variable:
    """Returns a flag that ends a running loop when it is set, a bool scalar.

    It is one variable on the host, also in the scope of a strategy. A strategy would keep it on its
    GPUs, and each step would wait for a copy of it. Runs eagerly, on the host.
    """

    def create_variable() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(False, trainable=False, name="stop")

    # The scope of a strategy applies to its thread only, so another thread is outside of it.
    with ThreadPoolExecutor(1) as outside_of_the_scope:
        return outside_of_the_scope.submit(create_variable).result()


def should_continue(stop: tf.Variable, *conditions: tf.Tensor) -> tf.Tensor:
    """Returns whether a loop takes another step, a bool scalar. Runs in graph, on the host.

    All conditions have to be true, and no stop may be requested.

    Args:
      stop: The flag of stop_variable.
      *conditions: Boolean scalars.
    """
    # Without a device TensorFlow would compute this on a GPU. Each step would then wait until the
    # GPU has done the steps before it and the answer has come back.
    with tf.device("CPU:0"):
        result = tf.logical_not(stop)
        for condition in conditions:
            result = tf.logical_and(condition, result)
        return result


def create_boolean_constants() -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the tensors False and True, on the host.

    To create one for each call of a loop takes as long as a small step.
    """
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(False), tf.constant(True)


def as_int32(number: IntLike) -> tf.Tensor:
    """Returns a number as an int32 scalar.

    A tensor of that dtype is returned unchanged, since a cast takes 50 us.
    """
    if isinstance(number, tf.Tensor) and number.dtype == tf.int32:
        return number
    if type(number) is int:
        return _constant(number)
    return tf.cast(number, tf.int32)


@functools.lru_cache
def _constant(number: int) -> tf.Tensor:
    """Returns an int32 constant on the host. Each number is created once."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(number, tf.int32)


def batch_counter() -> tf.Variable:
    """Returns a counter that shows another thread the progress of a loop.

    It is an int64 scalar on the host.
    """
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")


class StopFlag:
    """The flag that loops in graph check before each step.

    Args:
      strategy: The run's strategy.

    Attributes:
      variable: A bool scalar on the host. Loops end when it is True.
      variables: All variables of the flag. Checkpoints do not contain them.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._num_workers = worker_count(strategy)

        # With several workers, a local request becomes the flag of all when they agree.
        self.variable = stop_variable()
        self._local_request = stop_variable()
        self.variables = [self.variable, self._local_request]
        self._requested_at: float | None = None

    def request(self) -> None:
        """Ends the running loop before its next step. Safe from another thread.

        Several workers end it together, after STOP_SYNC_INTERVAL steps at most. If one worker
        stopped alone, the others would wait for its gradients permanently.
        """
        self._requested_at = self._requested_at or time.monotonic()
        self._local_request.assign(True)
        if self._num_workers == 1:
            self.variable.assign(True)

    @property
    def is_requested(self) -> bool:
        """Whether running loops stop before their next step. The same on all workers."""
        if self._num_workers == 1:
            return self._requested_at is not None
        return bool(self.variable.numpy())

    @property
    def seconds_since_request(self) -> float:
        """The seconds since this process was asked to stop. 0 if it was not."""
        if not self._requested_at:
            return 0.0
        return time.monotonic() - self._requested_at

    @property
    def is_agreed(self) -> bool | None:
        """Whether all workers have agreed to stop. None if there is only one worker."""
        return self.is_requested if self._num_workers > 1 else None

    @tf.autograph.experimental.do_not_convert
    def sync_workers(self, count: tf.Variable) -> None:
        """Ends the loop on all workers at the same step if one was asked to stop.

        Runs in graph, after each step.

        Args:
          count: The counter of the steps, an integer scalar. It is the same on all workers.
        """
        if self._num_workers == 1:
            return

        def agree() -> tf.Tensor:
            requests = tf.cast(self._local_request, tf.int32)
            num_requests = sum_over_workers(self._strategy, requests)
            self.variable.assign(num_requests > 0)
            return num_requests

        tf.cond(tf.equal(count % STOP_SYNC_INTERVAL, 0), agree, lambda: 0)

    def sync_workers_between_loops(self) -> None:
        """Lets all workers stop if one was asked to. Runs eagerly, on the host.

        It is for trainers whose loops do not call `sync_workers`.
        """
        if self._num_workers > 1:
            request = "stop" if self._requested_at else "continue"
            requests = all_gather(self._strategy, request)
            self.variable.assign("stop" in requests)


def is_stopping(trainer: BaseTrainer, has_local_request: Callable[[], bool]) -> bool:
    """Whether a run has to stop. Runs eagerly, on the host.

    With several workers, this is whether they have agreed to stop.

    Args:
      trainer: The run's trainer, a BaseTrainer.
      has_local_request: A function that returns whether this process was asked to stop in another
        way, such as by a signal.
    """
    agreed = trainer.is_stop_agreed
    if agreed is not None:
        return bool(agreed)
    return has_local_request() or bool(trainer.is_stop_requested)


def create_wait_seconds() -> tf.Tensor:
    """Returns 0 seconds of waiting for data, a float64 scalar, for a TimedIterator.

    It is NaN if op determinism forbids clocks.
    """
    seconds = math.nan if is_op_determinism_enabled() else 0.0
    return tf.constant(seconds, tf.float64)


def parse_wait_seconds(seconds: float) -> float | None:
    """Returns the seconds that a TimedIterator has added up. None if there was no clock."""
    return None if math.isnan(seconds) else seconds


class TimedIterator:
    """An iterator that adds up the seconds that the loop waits for its elements.

    Runs in graph, on the host.

    It costs a few hundredths of a step of 0.1 ms, and nothing measurable of longer ones. An element
    that is requested inside another graph, of a tf.function, a tf.cond or a loop in the step, is
    not timed, because its seconds could not leave that graph.

    Args:
      iterator: An iterator over the data.
      wait_seconds: The seconds so far, a float64 scalar: `create_wait_seconds`, or the value of the
        clock before.
      exact: Whether the element waits for the first reading of the clock, which costs 3 % of such a
        step. Otherwise the reading may come some microseconds late. If operations run one after the
        other, it may come at any time.

    Attributes:
      wait_seconds: The seconds so far, including the elements since.
    """

    def __init__(
        self, iterator: Iterator[object], wait_seconds: tf.Tensor, exact: bool = True
    ) -> None:
        self._iterator = iterator
        self.wait_seconds = wait_seconds
        self._exact = exact

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        """Returns the next element, and adds the seconds that it took."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        is_symbolic = tf.is_symbolic_tensor(self.wait_seconds)
        clock_graph = self.wait_seconds.graph if is_symbolic else None
        if graph is not clock_graph or is_op_determinism_enabled():
            return next(self._iterator)

        begin = tf.timestamp()
        first_reading = [begin] if self._exact else []
        with tf.control_dependencies(first_reading):
            element = next(self._iterator)

        # The second reading of the clock waits for all tensors of the element.
        operations: dict[tf.Operation, None] = {}
        for part in tf.nest.flatten(element, expand_composites=True):
            if tf.is_symbolic_tensor(part):
                operations[part.op] = None
        with tf.control_dependencies(list(operations)), tf.device("CPU:0"):
            self.wait_seconds += tf.timestamp() - begin
        return element

    get_next = __next__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class SingleElementIterator:
    """An iterator over one element, for the steps of a loop in graph.

    With it, steps which call `next(iterator)` run inside the graph's loop. A loop inside the step
    would get the same element each time, because a loop in graph is traced once.

    Args:
      element: The element of the data.

    Attributes:
      is_overdrawn: Whether a step asked for more than this element.

    Raises:
      ValueError: when a step asks for a second element. Evaluate such a step with
        eval_tf_function=False.
    """

    def __init__(self, element: object) -> None:
        self._left = [element]
        self._graph = tf.compat.v1.get_default_graph()
        self.is_overdrawn = False

    def __iter__(self) -> SingleElementIterator:
        return self

    def __next__(self) -> Any:
        """Returns the element, once."""
        if not self._left or self._is_in_inner_loop():
            self.is_overdrawn = True
            raise ValueError(
                "an evaluation step took two elements from its iterator; "
                "set trainer.eval_tf_function=false"
            )
        return self._left.pop()

    get_next = __next__

    def _is_in_inner_loop(self) -> bool:
        """Whether a loop of the step itself asks, in a graph inside that of this iterator."""
        graph = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if type(graph).__name__ == "WhileBodyFuncGraph":
                return True
            graph = getattr(graph, "outer_graph", None)
        return False


def loop_over_elements(
    iterator: tf.data.Iterator,
    limit: tf.Tensor,
    stop: tf.Variable,
    step: Callable[[SingleElementIterator, list[tf.Tensor]], list[tf.Tensor]],
    state: Sequence[tf.Tensor] = (),
    done: int | tf.Tensor = 0,
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Calls `step(element, state) -> state` until the data ends. Runs in graph.

    It ends earlier when enough steps are done, or when a stop is requested.
    `get_next_as_optional` ends the loop inside the graph, without an exception, also for ragged
    batches and replicas.

    Args:
      iterator: An iterator over the data.
      limit: The largest number of steps, including those done before, an int32 scalar. -1 means all
        of the data.
      stop: The flag of stop_variable.
      step: A function of an iterator over one element, and the state.
      state: Tensors. Each keeps its dtype and its static shape.
      done: The number of steps done before, an int32 scalar.

    Returns:
      The number of steps done, including those before, and the state.
    """

    def condition(
        done: tf.Tensor,
        is_below_limit: tf.Tensor,
        element: tf.experimental.Optional,
        state: list[tf.Tensor],
    ) -> tf.Tensor:
        return should_continue(stop, element.has_value(), is_below_limit)

    def body(
        done: tf.Tensor,
        is_below_limit: tf.Tensor,
        element: tf.experimental.Optional,
        state: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.experimental.Optional, list[tf.Tensor]]:
        # Otherwise "while/" would stand before the names of the task's summaries.
        with tf.name_scope(""):
            state = step(SingleElementIterator(element.get_value()), state)

        # After the last step no element is read. A branch around the step itself would cost more
        # than a small step.
        next_done = done + 1
        is_below_limit = tf.not_equal(next_done, limit)
        next_element = tf.cond(is_below_limit, iterator.get_next_as_optional, lambda: element)
        return next_done, is_below_limit, next_element, state

    done = tf.convert_to_tensor(done)
    state = list(state)
    starts_below_limit = tf.not_equal(done, limit)
    first_element = iterator.get_next_as_optional()
    start = (done, starts_below_limit, first_element, state)

    shapes = (None, None, None, [tensor.shape for tensor in state])
    done, _, _, state = tf.while_loop(condition, body, start, shapes)
    return done, state
