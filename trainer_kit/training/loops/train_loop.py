"""The training loop as a tf.function: many steps in one call, and one transfer of the results.

A loop checks a stop variable before each step, so a signal ends it within one step although Python
waits for the call. SegmentedLoop splits a loop into several calls, so that work can be done between
two steps. FiniteWeightsCheck checks the weights inside the loop. This module does not know what a
step does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.durations import get_exact_steps
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.training.loops.iterators import (
    TimedIterator,
    as_int32,
    create_boolean_constants,
    create_wait_seconds,
    parse_wait_seconds,
    should_continue,
)
from trainer_kit.training.loops.loop_function import (
    LoopFunction,
    Packed,
    Readback,
    eager,
    graph_function,
)
from trainer_kit.typing import IntLike, NestedSpec

# A function of an iterator, a number of steps, and whether to reset the metrics. It returns the
# number of steps done and the results, which are nested.
LoopFn = Callable[[Iterator[object], IntLike, bool], tuple[int, Any]]
# A function that returns the context of a call.
Context = Callable[[], contextlib.AbstractContextManager[Any]]
# The steps between checks when loops are shorter. A check in each loop would slow them down.
FINITE_CHECK_INTERVAL = 5
# The key in the results of a loop.
_FINITE_KEY = "trainer_kit/sound"
_NOT_CHECKED = -1


class LoopSteps(Protocol):
    """What a loop runs. A loop calls the methods in graph, in cross-replica context."""

    def reset(self) -> None:
        """Resets the metrics. A loop calls it first."""

    def step(self, iterator: Iterator[object]) -> Any:
        """Runs a step with exactly one element of the iterator. AutoGraph converts it."""

    def after_step(self) -> None:
        """Called after each step."""

    def results(self) -> Any:
        """Returns nested scalars and tensors after the last step."""


class TrainLoop:
    """Runs steps until enough are done or a stop is requested.

    Call it eagerly, on the host.

    Args:
      steps: What the loop runs.
      stop: The flag of stop_variable.
      use_tf_function: Whether to compile. If not, everything runs eagerly.
      use_tf_while_loop: Whether to compile the loop too, not only the step.
      exact_waits: Whether the time that the loop waits for batches is exact. This is for a loop
        that runs on one thread, where it costs nothing. See TimedIterator.

    Attributes:
      loop_function: The function of the whole loop, or of one step. None if nothing is compiled.
      is_loop_compiled: Whether the whole loop is one function.
      wait_seconds: The seconds that the last call waited for batches. None if the loop is not
        compiled, and with TensorFlow's op determinism, which has no clock.
    """

    def __init__(
        self,
        steps: LoopSteps,
        stop: tf.Variable,
        *,
        use_tf_function: bool = True,
        use_tf_while_loop: bool = True,
        exact_waits: bool = False,
    ) -> None:
        self._steps = steps
        self._stop = stop
        self._exact_waits = exact_waits
        self._flags = create_boolean_constants()
        self.is_loop_compiled = use_tf_while_loop
        self.wait_seconds: float | None = None

        wrapper = graph_function if use_tf_function else eager
        self._reset = wrapper(steps.reset)
        self._results = Readback(steps.results, wrapper)
        self.loop_function: LoopFunction | None = None
        if use_tf_while_loop:
            self.loop_function = LoopFunction(self._run_loop, "the training loop", _arguments)
        elif use_tf_function:
            self.loop_function = LoopFunction(self._run_step, "the training step")

    def __call__(
        self, iterator: Iterator[object], num_steps: IntLike, reset_metrics: bool = True
    ) -> tuple[int, Any]:
        """Returns the number of steps done and the results, as NumPy values.

        Args:
          iterator: An iterator over the data.
          num_steps: The number of steps to run.
          reset_metrics: Whether metrics are reset first. False continues a loop that was stopped in
            the middle.

        Raises:
          tf.errors.OutOfRangeError, StopIteration: when the data ends first. The steps before that
            have been done.
        """
        if self.is_loop_compiled and self.loop_function is not None:
            packed = self.loop_function(iterator, as_int32(num_steps), self._flags[reset_metrics])
            results, (done, waited) = self._results.unpack(packed)
            self.wait_seconds = parse_wait_seconds(waited)
            return int(done), results

        # Without a compiled loop, Python counts the steps and checks the stop flag.
        if reset_metrics:
            self._reset()
        step = self.loop_function or self._run_step
        steps_done = 0
        while steps_done < int(num_steps) and not self._stop.numpy():
            step(iterator)
            steps_done += 1

        return steps_done, self._results()

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the whole loop, or of the step. None if no graph exists."""
        if self.loop_function is None:
            return None
        return self.loop_function.newest_graph

    @tf.autograph.experimental.do_not_convert
    def _run_step(self, iterator: Iterator[object]) -> None:
        apply_autograph(self._steps.step)(iterator)
        self._steps.after_step()

    def _run_loop(
        self, iterator: Iterator[object], num_steps: tf.Tensor, reset_metrics: tf.Tensor
    ) -> Packed:
        steps = self._steps

        def condition(done: tf.Tensor, waited: tf.Tensor) -> tf.Tensor:
            return should_continue(self._stop, done < num_steps)

        def body(done: tf.Tensor, waited: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            clock = TimedIterator(iterator, waited, self._exact_waits)

            # Otherwise "while/" would stand before the names of the task's summaries.
            with tf.name_scope(""):
                apply_autograph(steps.step)(clock)
                steps.after_step()

            return done + 1, clock.wait_seconds

        tf.cond(reset_metrics, steps.reset, lambda: None)

        start = (tf.constant(0), create_wait_seconds())
        done, waited = tf.while_loop(condition, body, start)
        return self._results.pack(done, waited)


def _arguments(elements: NestedSpec) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Returns the specs of the arguments of a whole loop after its iterator.

    They do not depend on the elements of the iterator.
    """
    del elements
    return tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)


class TrainingHooks(Protocol):
    """An object whose methods are called before and after each step of training loops.

    They are called eagerly, on the host.
    """

    def begin(self, step: int) -> None:
        """Called before a step with the global step."""
        ...

    def end(self, step: int, results: dict[str, Any]) -> bool:
        """Called after a part of a loop.

        `Trainer.convert_to_logs` makes logs of the results.

        Args:
          step: The global step.
          results: The results of the loop so far, as NumPy values.

        Returns:
          Whether the loop continues.
        """
        ...


class FirstStepCheck(Protocol):
    """A part of a trainer that checks a step which has run."""

    def check_first_step(self) -> None:
        """Refuses a step whose trace shows that it cannot train as the config asks.

        Called after the first step of each traced loop function, before the second one. Runs
        eagerly, on the host.

        Raises:
          UsageError: when the step is refused. See MicroBatches.check_first_step.
        """


class SegmentedLoop:
    """Runs the loops of a trainer in one or several calls.

    The results do not depend on the number of calls. Runs eagerly, on the host.

    The first step of a new loop function is a separate call. It includes tracing, compiling and
    usually the longest wait for data. For a loop with an attribute `fuse_steps`, the first call has
    that number of steps, since stops come only between programs.

    Args:
      global_step: The global step, which is read only when there may be work between two steps.
      checks: What checks the first step of a new loop function when that is done.

    Attributes:
      hooks: The object to call around parts of each loop. With None, a loop has no such parts.
      first_step_at: The time.perf_counter() when a loop function had last run its first step. 0
        before that. Loops that call the same function again do not change it.
      wait_seconds: The seconds that the last loop waited for batches, without the first step of a
        new loop function. None if the loop function does not measure them.
      results: The results of the last loop. None if the loop did not read them, or they were taken.
    """

    def __init__(self, global_step: tf.Variable, checks: Sequence[FirstStepCheck] = ()) -> None:
        self._global_step = global_step
        self._checks = checks
        self._traced_loop: LoopFn | None = None
        self.hooks: TrainingHooks | None = None
        self.first_step_at = 0.0
        self.wait_seconds: float | None = None
        self.results: Any = None

    def run(
        self,
        loop: LoopFn,
        iterator: Iterator[object],
        num_steps: IntLike,
        reset_metrics: bool,
        context: Context = contextlib.nullcontext,
    ) -> int:
        """Runs `loop(iterator, num_steps, reset_metrics)` in one or more calls.

        Args:
          loop: The loop function. If it ends before `num_steps`, a stop was requested, and it is
            not called again. Its attribute `wait_seconds`, if any, is the seconds that its last
            call waited for batches.
          iterator: The iterator for the loop.
          num_steps: The number of steps, an integer or a scalar tensor.
          reset_metrics: Whether the loop resets its metrics first. Calls after the first one never
            do.
          context: Returns a context for each call of the loop. What is done between two calls is
            outside of it.

        Returns:
          The number of steps done.

        Raises:
          Exception: any error of the loop. The steps before the error have been done.
        """
        # The results stay None when the data ends inside the loop.
        self.results = None

        # With no work between two steps, one call runs the whole loop.
        if loop is self._traced_loop and self.hooks is None:
            with context():
                done, self.results = loop(iterator, num_steps, reset_metrics)
            self.wait_seconds = getattr(loop, "wait_seconds", None)
            return done

        # Otherwise it runs in parts: one for each step with hooks, else one for its first step.
        begin = int(self._global_step.numpy())
        end = begin + int(num_steps)
        step = begin
        waited = 0.0
        results: Any = None

        while step < end:
            is_traced = loop is self._traced_loop
            part_end = end
            if not is_traced:
                first_steps = getattr(loop, "fuse_steps", 1)
                part_end = min(end, step + first_steps)
            if self.hooks is not None:
                part_end = step + 1
                self.hooks.begin(step)

            # Only the first part resets the metrics, so the results are those of the whole loop.
            resets_now = reset_metrics and step == begin
            with context():
                count, results = loop(iterator, part_end - step, resets_now)

            step += count
            if is_traced:
                waited += getattr(loop, "wait_seconds", None) or 0.0
            else:
                self._traced_loop = loop
                self.first_step_at = time.perf_counter()
                for check in self._checks:
                    check.check_first_step()

            # A loop that ends early was stopped. It is not called again.
            if step < part_end:
                break
            if self.hooks is not None and not self.hooks.end(step, results):
                break

        is_measured = getattr(loop, "wait_seconds", None) is not None
        self.wait_seconds = waited if is_measured else None
        self.results = results
        return step - begin

    def take_results(self) -> Any:
        """Returns the results of the last loop, once. None if the loop did not read them."""
        results = self.results
        self.results = None
        return results


class FiniteWeightsCheck:
    """Checks the weights at the end of a training loop.

    Args:
      state: The TrainState of the run.
      global_step: The global step, an int64 scalar.
      options: The section trainer of the config. Its steps_per_loop is the number of steps of each
        loop.
    """

    def __init__(self, state: TrainState, global_step: tf.Variable, options: TrainerConfig) -> None:
        self._state = state
        self._global_step = global_step
        self._steps_per_loop: int = getattr(options, "steps_per_loop", 1)

    @tf.autograph.experimental.do_not_convert
    def result(self, is_segmented: bool = False) -> dict[str, tf.Tensor]:
        """Returns an entry for the loop's results, an int32 scalar.

        It is 1 if all weights are finite, 0 if not, and -1 if they were not checked.

        Runs in graph.

        Args:
          is_segmented: Whether there are results after each few steps of the loop.
        """
        if self._steps_per_loop >= FINITE_CHECK_INTERVAL and not is_segmented:
            return {_FINITE_KEY: self._compute_all_finite()}

        is_due = tf.equal(self._global_step % FINITE_CHECK_INTERVAL, 0)
        is_finite = tf.cond(is_due, self._compute_all_finite, lambda: tf.constant(_NOT_CHECKED))
        return {_FINITE_KEY: is_finite}

    def _compute_all_finite(self) -> tf.Tensor:
        return tf.cast(self._state.compute_weights_finite(), tf.int32)


def pop_finite(results: dict[str, Any]) -> bool | None:
    """Removes from the results of a loop whether the weights were finite, and returns it.

    Returns None if the loop did not check.
    """
    value = int(results.pop(_FINITE_KEY, _NOT_CHECKED))
    return None if value == _NOT_CHECKED else value == 1


class SummaryTimer:
    """Chooses the last step of the first training loop that begins after a time.

    Then the time counts again.

    Args:
      seconds: The seconds between summaries.
      clock: Returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._chosen_at = clock()

        with tf.device("CPU:0"), tf.init_scope():
            self._step = tf.Variable(-1, trainable=False, dtype=tf.int64, name="summary_step")

    def choose(self, end: int) -> bool:
        """Chooses the step that leads to the global step `end` if the time is over.

        Runs eagerly.

        Returns:
          Whether it chose the step.
        """
        now = self._clock()
        is_over = now - self._chosen_at >= self._seconds
        if is_over:
            self._chosen_at = now
            self._step.assign(end - 1)
        return is_over

    def is_chosen(self, step: tf.Variable) -> tf.Tensor:
        """Returns whether the step that begins at the global step `step` is the chosen one.

        The result is a bool scalar. Runs in graph.
        """
        return tf.equal(step, self._step)


def summary_condition(
    interval: int | SummaryTimer | None, step: tf.Variable, end: int
) -> Callable[[], tf.Tensor] | bool:
    """Returns the condition of a training loop for tf.summary.record_if.

    Runs eagerly. The condition is called in graph.

    Args:
      interval: The steps between summaries, or a timer. With None there are no summaries.
      step: The global step, an int64 scalar.
      end: The global step at the end of the loop.
    """
    if not interval:
        return False
    if isinstance(interval, SummaryTimer):
        interval.choose(end)
        return functools.partial(interval.is_chosen, step)
    return functools.partial(_is_due, step, interval)


def _is_due(step: tf.Variable, interval: int) -> tf.Tensor:
    """Returns whether `step` is the first one at or after a multiple of the interval.

    The result is a bool scalar. Runs in graph.
    """
    exact = get_exact_steps(interval)
    steps = exact.numerator
    parts = exact.denominator
    if parts == 1:
        return tf.equal(step % steps, 0)

    # The interval is the fraction steps / parts, and whole numbers keep the comparison exact.
    return tf.less(step * parts % steps, parts)
