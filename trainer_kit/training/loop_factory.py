"""LoopFactory: creates the training loops that a config asks for, and runs them on its executor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_training_sets
from trainer_kit.errors import add_note
from trainer_kit.optimizers.gradient_processing import parse_non_finite_gradient
from trainer_kit.runtime.executor import SINGLE_THREADED, use_executor
from trainer_kit.training.checks.failed_step import explain_gradient_errors
from trainer_kit.training.checks.model_and_config import (
    warn_about_dropped_assertions,
    warn_about_slow_convolutions,
)
from trainer_kit.training.engine_options import EngineOptions
from trainer_kit.training.loops.fused_loop import (
    BatchStack,
    FusedLoop,
    check_fusing,
    explain_xla_errors,
    find_fusing_problem,
)
from trainer_kit.training.loops.iterators import StopFlag
from trainer_kit.training.loops.loop_function import check_one_thread
from trainer_kit.training.loops.train_loop import LoopSteps, TrainLoop
from trainer_kit.training.micro_batches import less_memory_advice
from trainer_kit.typing import DataIterator, Dataset, ExperimentLike

# What a LoopFactory creates, as opposed to the loop functions of a subclass of Trainer.
FactoryLoop: TypeAlias = TrainLoop | FusedLoop

_LOG = logging.getLogger(__name__)
_UNNAMED_OPERATION = (
    "on one thread TensorFlow does not say which operation of the loop has failed; "
    "start the run again in a new model_dir with runtime.executor=default to see it"
)


class LoopFactory:
    """Creates training loops, checks their graphs, and provides the context in which they run.

    The config decides about all three: whether steps are fused or compiled, and which executor of
    TensorFlow runs the loop. Created in strategy scope.

    Args:
      config: The experiment's config.
      stop_flag: The StopFlag, which ends a loop before its next step.
      fuse_steps: The number of steps in one XLA program. 1 means that steps are not fused.
      custom_loop_class: The name of a class that overrides create_train_loop_fn. "" if there is
        none.

    Attributes:
      fuse_steps: The argument of this name.
      stack: The batches of fused steps that a loop has read and not used, for the next loop.
    """

    def __init__(
        self,
        config: ExperimentLike,
        stop_flag: StopFlag,
        fuse_steps: int,
        custom_loop_class: str,
    ) -> None:
        self._config = config
        self._stop_flag = stop_flag
        self._custom_loop_class = custom_loop_class
        self._strategy = tf.distribute.get_strategy()
        self._executor = EngineOptions.from_config(config).executor
        self.fuse_steps = fuse_steps
        self.stack = BatchStack()

    def find_fusing_problem(self, dataset: Dataset | None) -> str:
        """Returns why steps cannot be fused. "" if no reason is known.

        Args:
          dataset: A ready-made dataset to train on. None: the task's data is used.
        """
        return find_fusing_problem(self._config, self._strategy, dataset, self._custom_loop_class)

    def check_fusing(self, dataset: Dataset | None) -> None:
        """Raises UsageError when steps are to be fused and cannot be. See `find_fusing_problem`."""
        problem = self.find_fusing_problem(dataset)
        check_fusing(self.fuse_steps, problem)

    def next_batch(self, iterator: DataIterator) -> Any:
        """Takes the next batch from an iterator over the training data. Runs eagerly, on the host.

        An element of the iterator is a batch, or a stack of batches for fused steps.
        """
        if self.fuse_steps > 1:
            return self.stack.next_batch(iterator)
        return next(iterator)

    def create_loop(self, steps: LoopSteps) -> FactoryLoop:
        """Returns a new loop of these steps that is not traced yet."""
        stop = self._stop_flag.variable
        if self.fuse_steps > 1:
            return FusedLoop(steps, stop, self.stack, self.fuse_steps)

        return TrainLoop(
            steps,
            stop,
            use_tf_function=self._config.trainer.train_tf_function,
            use_tf_while_loop=self._config.trainer.train_tf_while_loop,
            exact_waits=self._executor == SINGLE_THREADED,
        )

    def check(self, graph: tf.Graph | None) -> None:
        """Checks the graph of a new loop before the first step.

        Warns of what the graph leaves out or cannot use well. Runs eagerly, on the host.

        Args:
          graph: The graph of the loop. None: the loop is not compiled.

        Raises:
          UsageError: when the executor is single_threaded and would wait forever.
        """
        if self.fuse_steps > 1:
            warn_about_dropped_assertions(graph)
            warn_about_slow_convolutions(graph)

            steps_per_loop = self._config.trainer.steps_per_loop
            if steps_per_loop % self.fuse_steps:
                _LOG.warning(
                    "trainer.fuse_steps=%d: loops of %d steps end inside a stack of batches, "
                    "so the last program of a loop runs fewer steps; "
                    "make trainer.steps_per_loop a multiple of fuse_steps",
                    self.fuse_steps,
                    steps_per_loop,
                )

        if self._executor == SINGLE_THREADED and graph is not None:
            check_one_thread(graph)

    @contextlib.contextmanager
    def use_configured_executor(self) -> Iterator[None]:
        """A context in which a loop is traced or runs on the executor of the config.

        Adds notes to errors of TensorFlow operations. They name the setting that needs less memory,
        and how to see which operation has failed. Entered eagerly, on the host.

        Raises:
          UsageError: instead of the error with which XLA refuses a fused loop.
          GradientDivergence: instead of the error of a step with a gradient that is not finite.
        """
        with explain_xla_errors(self.fuse_steps), explain_gradient_errors():
            try:
                with use_executor(self._executor):
                    yield
            except tf.errors.OutOfRangeError:
                # The data has ended. The trainer handles this.
                raise
            except tf.errors.OpError as error:
                if isinstance(error, tf.errors.ResourceExhaustedError):
                    training_sets = get_training_sets(self._config.task).values()
                    batch_sizes = [
                        int(getattr(data, "global_batch_size", 0) or 0) for data in training_sets
                    ]
                    replicas = tf.distribute.get_strategy().num_replicas_in_sync
                    examples = max(batch_sizes, default=0) // replicas
                    steps = self._config.trainer.accumulate_steps
                    add_note(error, less_memory_advice(steps, examples))

                # The error of a non-finite gradient names the variable and the step itself.
                if self._executor == SINGLE_THREADED and not parse_non_finite_gradient(error):
                    add_note(error, _UNNAMED_OPERATION)
                raise
