"""The training loop as a tf.function: many steps in one call, and one transfer of the results.

A loop checks a stop variable before each step, so a signal ends it within one step although Python waits for the call.
This module does not know what a step does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.inputs.autograph import converted
from trainer_kit.training.loops.host_variables import as_int32, flags, should_continue
from trainer_kit.training.loops.iterators import WaitingClock, known_waits, no_waits
from trainer_kit.training.loops.loop_results import Readback
from trainer_kit.training.loops.tracing import LoopFunction, eager, graph_function

Begin = Callable[[], None]
Step = Callable[[Any], Any]
Results = Callable[[], Any]


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
