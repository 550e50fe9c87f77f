"""NewLoops: creates the training loops of a trainer, and chooses the executor that runs them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.evaluation import training_sets
from trainer_kit.distribution.executor import executor
from trainer_kit.errors import add_note
from trainer_kit.inputs.fused_batches import tell_of_stacks
from trainer_kit.optimizers.gradient_processors import refused_gradient
from trainer_kit.telemetry.profile_window import ProfileWindow
from trainer_kit.training.checks.finite_gradients import reporting_gradients
from trainer_kit.training.checks.model_and_config import (
    problem_of_one_thread,
    tell_dropped_assertions,
    tell_slow_convolutions,
)
from trainer_kit.training.loops.executor_choice import ExecutorChoice, executor_by_graph, executor_by_weights
from trainer_kit.training.loops.fused_loop import FusedLoop, Stack, reporting_refusal
from trainer_kit.training.loops.last_batch import LastBatch
from trainer_kit.training.loops.nested_conditions import check_one_thread, has_nested_conditions
from trainer_kit.training.loops.train_loop import Begin, Results, Step, TrainLoop
from trainer_kit.training.trainer_parts.stop_flag import StopFlag

_LOG = logging.getLogger(__name__)
_ONE_THREAD = "single_threaded"
_LESS_MEMORY = (
    "trainer.accumulate_steps=auto trains on each batch in parts that fit into memory, with one update; a larger "
    "number needs less memory"
)


class NewLoops:
    """Creates training loops, and chooses their executor before the first step. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      reset: A function that resets the metrics; called first in each loop, in graph.
      step: A function of the iterator that runs one training step.
      results: A function that returns the logs of the loop.
      stop_flag: The StopFlag, which ends a loop before its next step.
      global_step: The global step, an int64 scalar.
      weights: A function that returns the trainable variables.
      fuse_steps: The number of steps in one XLA program; 1: steps are not fused.
      own_loop: Whether a subclass of the trainer creates the loops; auto means the default executor then.

    Attributes:
      executor: The executor of the loops; auto until it is chosen.
      fuse_steps: The argument of this name.
      stack: The batches of fused steps that a loop has not used, for the next loop.
    """

    def __init__(
        self,
        config: Any,
        reset: Begin,
        step: Step,
        results: Results,
        stop_flag: StopFlag,
        global_step: tf.Variable,
        weights: Callable[[], Sequence[Any]],
        fuse_steps: int,
        own_loop: bool = False,
    ) -> None:
        self._config, self._parts, self._weights = config, (reset, step, results, stop_flag.variable), weights
        self._stop_flag, self._global_step = stop_flag, global_step
        self.fuse_steps, self.stack = fuse_steps, Stack()
        self.executor: str = getattr(config.runtime, "executor", "default")
        parts = getattr(config.trainer, "accumulate_steps", 1)  # of a step; those of several are for several threads
        one_thread = fuse_steps == parts == 1 and not own_loop
        if self.executor == "auto" and not (one_thread and not problem_of_one_thread(tf.distribute.get_strategy())):
            self.executor = "default"

    def make(self, batch_spec: Any) -> TrainLoop | FusedLoop:
        """Returns a new loop that is not traced yet.

        Args:
          batch_spec: The spec of the elements that the loop reads.
        """
        if self.fuse_steps > 1:
            return FusedLoop(*self._parts, self.stack, self.fuse_steps)
        return TrainLoop(
            *self._parts,
            after_step=lambda: self._stop_flag.agree(self._global_step),
            use_tf_function=self._config.trainer.train_tf_function,
            use_tf_while_loop=self._config.trainer.train_tf_while_loop,
            last_batch=LastBatch(batch_spec) if self._executor_to_trace_for == _ONE_THREAD else None,
        )

    def chosen(
        self, loop: TrainLoop | FusedLoop, graph: tf.Graph | None, batch_spec: Any, window: ProfileWindow
    ) -> TrainLoop | FusedLoop:
        """Chooses the executor if it is auto, and returns the loop to run. Runs eagerly, before the first step.

        It warns of what fused steps leave out or cannot use well.

        Args:
          loop: A loop of `make`, traced in the context `running`.
          graph: The graph of the loop; None: it is not compiled.
          batch_spec: See `make`.
          window: The steps of this run that will be traced for a profile.

        Raises:
          UsageError: when the executor is single_threaded, and would wait for ever.
        """
        if self.fuse_steps > 1:
            tell_dropped_assertions(graph)
            tell_slow_convolutions(graph)
            tell_of_stacks(batch_spec, self.fuse_steps, self._config.trainer.steps_per_loop)
        profiles = not window.passed
        if self.executor != "auto":
            if self.executor == _ONE_THREAD and graph is not None:
                check_one_thread(graph)
            if self.executor == _ONE_THREAD and profiles:
                _LOG.warning("runtime.executor is single_threaded: the profile will show no TensorFlow operations")
            return loop
        traced_for, choice = self._executor_to_trace_for, self._choice(loop, graph, profiles)
        _LOG.info("runtime.executor=auto: %s, since %s", choice.name, choice.reason)
        self.executor = choice.name
        return loop if choice.name == traced_for else self.make(batch_spec)

    @contextlib.contextmanager
    def running(self, loop: Any) -> Iterator[None]:
        """A context in which a loop runs on the chosen executor, and errors name their cause.

        Runs eagerly, on the host.

        Args:
          loop: The loop; None: a new one is traced, for the executor that is likely to be chosen.
        """
        with reporting_refusal(self.fuse_steps), reporting_gradients():
            if loop is None:
                with executor(self._executor_to_trace_for):
                    yield
                return
            with self._explained_errors(loop), executor(self.executor):
                yield

    @property
    def _executor_to_trace_for(self) -> str:
        """The executor that a loop is traced for first: TensorFlow gives branches another form for one thread."""
        if self.executor != "auto":
            return self.executor
        return _ONE_THREAD if executor_by_weights(self._weights(), self._batch_size) is None else "default"

    def _choice(self, loop: TrainLoop | FusedLoop, graph: tf.Graph | None, profiles: bool) -> ExecutorChoice:
        choice = executor_by_weights(self._weights(), self._batch_size) or executor_by_graph(graph, self._batch_size)
        if choice.name == _ONE_THREAD and graph is not None and has_nested_conditions(graph):
            return ExecutorChoice("default", "one thread waits for ever for a tf.cond inside of a tf.cond")
        if choice.name == _ONE_THREAD and not (loop.last_batch and loop.last_batch.is_kept):
            return ExecutorChoice("default", "errors of this training step could not be explained on one thread")
        if choice.name == _ONE_THREAD and profiles:
            _LOG.warning(
                "because of the profile, runtime.executor=auto chooses default for the whole run; steps as small as "
                "these take longer with it, and their last bits may differ from those of a run without a profile; set "
                "runtime.executor=single_threaded to use one thread, whose profile shows no TensorFlow operations"
            )
            return ExecutorChoice("default", "a profile of one thread shows no TensorFlow operations")
        return choice

    @contextlib.contextmanager
    def _explained_errors(self, loop: Any) -> Iterator[None]:
        """Has errors of a loop on one thread name the operation that failed.

        Where memory runs out, a note names the setting that needs less.
        """
        try:
            yield
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.ResourceExhaustedError):
                add_note(error, _LESS_MEMORY)
            if getattr(loop, "last_batch", None) is None or refused_gradient(
                error
            ):  # which tells the variable and the step
                raise
            reached = self._global_step.numpy()
            explained = loop.last_batch.explained(error, self._parts[1])
            self._global_step.assign(reached)
            raise explained from None

    @property
    def _batch_size(self) -> int:
        sets = training_sets(self._config.task).values()
        return max(int(getattr(data, "global_batch_size", 0)) for data in sets)
