"""The training loop as a tf.function: many steps in one call, and one transfer of the results.

A loop checks a stop variable before each step, so a signal ends it within one step although Python waits for the call.
LoopParts splits a loop into several calls, so that work can be done between two steps. FiniteWeights checks the weights
inside the loop. This module does not know what a step does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.durations import exact_steps
from trainer_kit.inputs.autograph import converted
from trainer_kit.telemetry.profile_window import NO_WINDOW, parts
from trainer_kit.training.loops.iterators import WaitingClock, as_int32, flags, known_waits, no_waits, should_continue
from trainer_kit.training.loops.tracing import LoopFunction, Readback, eager, graph_function

Begin = Callable[[], None]
Step = Callable[[Any], Any]
Results = Callable[[], Any]
Loop = Callable[[Any, Any, bool], tuple[int, Any]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
LOOK_EVERY = 5  # steps between checks when loops are shorter: a check in each loop would slow them down
_SOUND = "trainer_kit/sound"  # of the results of a loop
_NO_LOOK = -1


class TrainLoop:
    """Runs steps until enough are done or a stop is requested.

    Args:
      begin: A function that resets the metrics; called first, in graph.
      step: A function that uses exactly one element of the iterator; AutoGraph converts it.
      after_step: A function that is called after each step, in graph.
      results: A function that returns nested scalars and tensors after the last step.
      stop: The flag of stop_variable.
      use_tf_function: Whether to compile; if not, everything runs eagerly.
      use_tf_while_loop: Whether to compile the loop too, not only the step.
      exact_waits: Whether the time that the loop waits for batches is exact; for a loop that runs on one thread, where
        it costs nothing. See WaitingClock.

    Attributes:
      waited: The seconds that the last call waited for batches; None if the loop is not compiled, and with
        TensorFlow's op determinism, which has no clock.
    """

    def __init__(
        self,
        begin: Begin,
        step: Step,
        results: Results,
        stop: tf.Variable,
        *,
        after_step: Callable[[], None] = lambda: None,
        use_tf_function: bool = True,
        use_tf_while_loop: bool = True,
        exact_waits: bool = False,
    ) -> None:
        compiled = graph_function if use_tf_function else eager
        self._begin, self._stop = compiled(begin), stop
        alone = _both(step, after_step)
        self._step = LoopFunction(alone, "the training step") if use_tf_function else alone
        self._results = Readback(results, compiled)
        self.waited: float | None = None
        self._flags = flags()
        whole = self._graph(begin, step, after_step, self._results.pack, stop, exact_waits)
        self.whole = LoopFunction(whole, "the training loop") if use_tf_while_loop else None

    def __call__(self, iterator: Any, num_steps: tf.Tensor, fresh: bool = True) -> tuple[int, Any]:
        """Returns the number of steps done and the results, as NumPy values.

        Args:
          iterator: An iterator over the data.
          num_steps: The number of steps to run.
          fresh: Whether metrics are reset first; False continues a loop that was stopped in the middle.

        Raises:
          tf.errors.OutOfRangeError, StopIteration: when the data ends first; the steps before that have been done.
        """
        if self.whole is not None:
            results, (done, waited) = self._results.unpack(
                self.whole(iterator, as_int32(num_steps), self._flags[fresh])
            )
            self.waited = known_waits(waited)
            return int(done), results
        if fresh:
            self._begin()
        done = 0
        while done < int(num_steps) and not self._stop.numpy():
            self._step(iterator)
            done += 1
        return done, self.results()

    def graph(self, iterator: Any) -> tf.Graph | None:
        """Returns the graph of the whole loop, or of a step, that the next call will use; None if not compiled."""
        if self.whole is not None and not tf.config.functions_run_eagerly():
            function = self.whole.function
            graph = function.get_concrete_function(iterator, as_int32(1), self._flags[True]).graph
            return self.whole.noted(graph, iterator)
        return self._step.graph(iterator) if isinstance(self._step, LoopFunction) else None

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the whole loop, or of the step; None if there is none."""
        return getattr(self.whole or self._step, "newest_graph", None)

    def results(self) -> Any:
        """Returns the current results as NumPy values; for a loop that the end of the data interrupted."""
        return self._results()

    @staticmethod
    def _graph(
        begin: Begin,
        step: Step,
        after_step: Callable[[], None],
        results: Callable[..., Any],
        stop: tf.Variable,
        exact_waits: bool,
    ) -> Any:
        def loop(iterator: Any, num_steps: tf.Tensor, fresh: tf.Tensor) -> Any:
            def go_on(done: tf.Tensor, waited: tf.Tensor) -> tf.Tensor:
                return should_continue(stop, done < num_steps)

            def one_step(done: tf.Tensor, waited: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                clock = WaitingClock(iterator, waited, exact_waits)
                with tf.name_scope(""):  # else "while/" would stand before the names of the task's summaries
                    converted(step)(clock)
                    after_step()
                return done + 1, clock.waited

            tf.cond(fresh, begin, lambda: None)
            done, waited = tf.while_loop(go_on, one_step, (tf.constant(0), no_waits()))
            return results(done, waited)

        return loop


def _both(step: Step, after_step: Callable[[], None]) -> Step:
    def whole_step(iterator: Any) -> Any:
        converted(step)(iterator)
        after_step()

    return whole_step


class TrainingHooks(Protocol):
    """An object whose methods are called before and after the parts of training loops, eagerly, on the host."""

    def next_end(self, step: int) -> int:
        """Returns the next global step after `step` at which a part ends."""
        ...

    def begin(self, step: int) -> None:
        """Called before a part with the global step."""
        ...

    def end(self, step: int, results: dict[str, Any]) -> bool:
        """Called after a part with the global step and the results of the loop so far, as NumPy values.

        `Trainer.reported` makes logs of the results. Returns whether the loop goes on.
        """
        ...


class LoopParts:
    """Runs the loops of a trainer in one or several calls; the results do not depend on the number of calls.

    The first step of a new loop function is a separate call: it includes tracing, compiling and usually the longest
    wait for data. For a loop with an attribute `fuse_steps`, the first call has that number of steps, since stops come
    only between programs.

    Args:
      step: A function that returns the global step; called only when there may be work between two steps.
      on_ready: A function that is called when the first step of a new loop function is done.

    Attributes:
      window: The steps to trace for a profile.
      hooks: The object to call around parts of each loop; None: a loop has no such parts.
      ready_at: The time.perf_counter() at the end of the first step of the newest loop function; 0 before that.
      waited: The seconds that the last loop waited for batches, without the first step of a new loop function; None if
        the loop function does not measure them.
      results: The results of the last loop; None if the loop did not read them, or they were taken.
      tracing: The seconds that the last loop needed to start and write a profiler trace.
    """

    def __init__(self, step: Callable[[], int], on_ready: Callable[[], None] = lambda: None) -> None:
        self.window, self.ready_at = NO_WINDOW, 0.0
        self.hooks: TrainingHooks | None = None
        self.waited: float | None = None
        self.tracing = 0.0
        self.results: Any = None
        self._step, self._on_ready = step, on_ready
        self._known: Loop | None = None

    def run(
        self, loop: Loop, iterator: Any, num_steps: Any, fresh: bool, context: Context = contextlib.nullcontext
    ) -> int:
        """Runs `loop(iterator, num_steps, fresh)` in one or several calls, and returns the number of steps done.

        Args:
          loop: The loop function. If it ends before `num_steps`, a stop was requested, and it is not called again. Its
            attribute `waited`, if any, is the seconds that its last call waited for batches.
          iterator: The iterator for the loop.
          num_steps: The number of steps: an integer or a scalar tensor.
          fresh: Whether the loop resets its metrics first; calls after the first one never do.
          context: Returns a context for each call of the loop. What is done between two calls is outside of it.

        Raises:
          Exception: any error of the loop; the steps before the error have been done.
        """
        self.tracing, self.results = 0.0, None  # and so it stays when the data ends inside the loop
        if self.window.passed and loop is self._known and self.hooks is None:
            with context():
                done, self.results = loop(iterator, num_steps, fresh)
            self.waited = getattr(loop, "waited", None)
            return done
        return self._in_parts(loop, iterator, int(num_steps), fresh, context)

    def _in_parts(self, loop: Loop, iterator: Any, num_steps: int, fresh: bool, context: Context) -> int:
        step, done, waited, results = self._step(), 0, 0.0, None
        for part in self._lengths(loop, step, num_steps):
            self._trace(self.window.before, step + done, step + done + part)
            if self.hooks is not None:
                self.hooks.begin(step + done)
            with context():
                count, results = loop(iterator, part, fresh and done == 0)
            done += count
            if loop is self._known:
                waited += getattr(loop, "waited", None) or 0.0
            else:
                self._known, self.ready_at = loop, time.perf_counter() - self.tracing
                self._on_ready()
            self._trace(self.window.after, step + done)
            if count < part or (self.hooks is not None and not self.hooks.end(step + done, results)):
                break
        self.waited = None if getattr(loop, "waited", None) is None else waited
        self.results = results
        return done

    def _lengths(self, loop: Loop, step: int, num_steps: int) -> Iterator[int]:
        """Yields the number of steps of each call of the loop."""
        cuts = [*self.window.cuts(), *([] if loop is self._known else [step + getattr(loop, "fuse_steps", 1)])]
        for part in parts(step, num_steps, cuts):
            end = step + part
            while step < end:
                begin, step = step, end if self.hooks is None else min(end, self.hooks.next_end(step))
                yield step - begin

    def _trace(self, action: Callable[..., None], *steps: int) -> None:
        begin = time.perf_counter()
        action(*steps)
        self.tracing += time.perf_counter() - begin


class FiniteWeights:
    """Checks the weights at the end of a training loop.

    Args:
      state: The TrainState of the run.
      global_step: The global step, an int64 scalar.
      options: The section trainer of the config; steps_per_loop is the number of steps of each loop.
    """

    def __init__(self, state: TrainState, global_step: tf.Variable, options: Any) -> None:
        self._state, self._global_step = state, global_step
        self._steps_per_loop: int = getattr(options, "steps_per_loop", 1)

    @tf.autograph.experimental.do_not_convert
    def result(self, in_parts: bool = False) -> dict[str, tf.Tensor]:
        """Returns an entry for the loop's results: 1 if all weights are finite, 0 if not, -1 if unchecked.

        Runs in graph.

        Args:
          in_parts: Whether there are results after each few steps of the loop.
        """
        if self._steps_per_loop >= LOOK_EVERY and not in_parts:
            return {_SOUND: self._look()}
        due = tf.equal(self._global_step % LOOK_EVERY, 0)
        return {_SOUND: tf.cond(due, self._look, lambda: tf.constant(_NO_LOOK))}

    def _look(self) -> tf.Tensor:
        return tf.cast(self._state.finite(), tf.int32)


def pop_finite(results: dict[str, Any]) -> bool | None:
    """Removes from the results of a loop whether the weights were finite, and returns it; None if it did not check."""
    seen = int(results.pop(_SOUND, _NO_LOOK))
    return None if seen == _NO_LOOK else seen == 1


class SummaryTimer:
    """Chooses the last step of the first training loop that begins after a time; then the time counts again.

    Args:
      seconds: The seconds between summaries.
      clock: Returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._chosen_at = seconds, clock, clock()
        with tf.device("CPU:0"), tf.init_scope():
            self._step = tf.Variable(-1, trainable=False, dtype=tf.int64, name="summary_step")

    def choose(self, end: int) -> bool:
        """Chooses the step that leads to the global step `end` if the time is over, and tells whether it did.

        Runs eagerly.
        """
        now = self._clock()
        is_over = now - self._chosen_at >= self._seconds
        if is_over:
            self._chosen_at = now
            self._step.assign(end - 1)
        return is_over

    def is_chosen(self, step: tf.Variable) -> tf.Tensor:
        """Returns whether the step that begins at the global step `step` is the chosen one; runs in graph."""
        return tf.equal(step, self._step)


def summary_condition(
    interval: int | SummaryTimer | None, step: tf.Variable, end: int
) -> Callable[[], tf.Tensor] | bool:
    """Returns the condition of a training loop for tf.summary.record_if.

    Runs eagerly; the condition is called in graph.

    Args:
      interval: The steps between summaries, or a timer; None: no summaries.
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
    """Returns whether `step` is the first one at or after a multiple of the interval, a bool scalar; runs in graph."""
    exact = exact_steps(interval)
    steps = exact.numerator
    parts = exact.denominator
    if parts == 1:
        return tf.equal(step % steps, 0)
    return tf.less(step * parts % steps, parts)
