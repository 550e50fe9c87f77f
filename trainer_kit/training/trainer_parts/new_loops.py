"""NewLoops: creates the training loops of a trainer, and runs them on the executor that the config names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.evaluation import training_sets
from trainer_kit.distribution.executor import executor
from trainer_kit.errors import add_note
from trainer_kit.inputs.fused_batches import tell_of_stacks
from trainer_kit.optimizers.gradient_processors import refused_gradient
from trainer_kit.telemetry.profile_window import ProfileWindow
from trainer_kit.training.checks.accumulating import less_memory_advice
from trainer_kit.training.checks.finite_gradients import reporting_gradients
from trainer_kit.training.checks.model_and_config import tell_dropped_assertions, tell_slow_convolutions
from trainer_kit.training.loops.fused_loop import FusedLoop, Stack, reporting_refusal
from trainer_kit.training.loops.nested_conditions import check_one_thread
from trainer_kit.training.loops.train_loop import Begin, Results, Step, TrainLoop
from trainer_kit.training.trainer_parts.stop_flag import StopFlag

_LOG = logging.getLogger(__name__)
_ONE_THREAD = "single_threaded"
_UNNAMED = (
    "on one thread TensorFlow does not say which operation of the loop has failed; start the run again in a new "
    "model_dir with runtime.executor=default to see it"
)


class NewLoops:
    """Creates training loops, and runs them. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      reset: A function that resets the metrics; called first in each loop, in graph.
      step: A function of the iterator that runs one training step.
      results: A function that returns the logs of the loop.
      stop_flag: The StopFlag, which ends a loop before its next step.
      global_step: The global step, an int64 scalar.
      fuse_steps: The number of steps in one XLA program; 1: steps are not fused.

    Attributes:
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
        fuse_steps: int,
    ) -> None:
        self._config = config
        self._parts = (reset, step, results, stop_flag.variable)
        self._stop_flag = stop_flag
        self._global_step = global_step
        self._executor: str = getattr(config.runtime, "executor", "default")
        self.fuse_steps = fuse_steps
        self.stack = Stack()

    def make(self) -> TrainLoop | FusedLoop:
        """Returns a new loop that is not traced yet."""
        if self.fuse_steps > 1:
            return FusedLoop(*self._parts, self.stack, self.fuse_steps)
        return TrainLoop(
            *self._parts,
            after_step=lambda: self._stop_flag.agree(self._global_step),
            use_tf_function=self._config.trainer.train_tf_function,
            use_tf_while_loop=self._config.trainer.train_tf_while_loop,
            exact_waits=self._executor == _ONE_THREAD,
        )

    def check(self, graph: tf.Graph | None, batch_spec: Any, window: ProfileWindow) -> None:
        """Checks the graph of a new loop before the first step, and warns of what it leaves out or cannot use well.

        Runs eagerly, on the host.

        Args:
          graph: The graph of the loop; None: it is not compiled.
          batch_spec: The spec of the elements that the loop reads.
          window: The steps of this run that will be traced for a profile.

        Raises:
          UsageError: when the executor is single_threaded, and would wait forever.
        """
        if self.fuse_steps > 1:
            tell_dropped_assertions(graph)
            tell_slow_convolutions(graph)
            tell_of_stacks(batch_spec, self.fuse_steps, self._config.trainer.steps_per_loop)

        if self._executor == _ONE_THREAD:
            if graph is not None:
                check_one_thread(graph)
            if not window.passed:
                _LOG.warning("runtime.executor is single_threaded: the profile will show no TensorFlow operations")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a loop is traced or runs on the executor of the config, and errors name their cause.

        Runs eagerly, on the host.
        """
        with (
            reporting_refusal(self.fuse_steps),
            reporting_gradients(),
            self._explained_errors(),
            executor(self._executor),
        ):
            yield

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Adds notes to errors: the setting that needs less memory, and how to see which operation has failed."""
        try:
            yield
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.ResourceExhaustedError):
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
                examples = self._batch_size // replicas
                add_note(error, less_memory_advice(self._config.trainer.accumulate_steps, examples))
            if self._executor == _ONE_THREAD and not refused_gradient(error):  # which has the variable and the step
                add_note(error, _UNNAMED)
            raise

    @property
    def _batch_size(self) -> int:
        sets = training_sets(self._config.task).values()
        return max(int(getattr(data, "global_batch_size", 0)) for data in sets)
