"""NewLoops: creates the training loops of a trainer, and chooses the executor that runs them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.training.checks.model_and_config import problem_of_one_thread, tell_dropped_assertions
from trainer_kit.training.loops.executor_choice import executor_by_graph, executor_by_weights
from trainer_kit.training.loops.fused_loop import FusedLoop, Stack
from trainer_kit.training.loops.train_loop import Begin, Results, Step, TrainLoop
from trainer_kit.training.trainer_parts.stop_flag import StopFlag

_LOG = logging.getLogger(__name__)


class NewLoops:
    """Creates training loops, and traces a loop before its first step. Created in the scope of the strategy.

    Args:
      config: The experiment's config.
      reset: A function that resets the metrics; called first in each loop, in graph.
      step: A function of the iterator that runs one training step.
      results: A function that returns the logs of the loop.
      stop_flag: The StopFlag, which ends a loop before its next step.
      global_step: The global step, an int64 scalar.
      fuse_steps: The number of steps in one XLA program; 1: steps are not fused.

    Attributes:
      fuse_steps: The argument.
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
        self._config, self._parts = config, (reset, step, results, stop_flag.variable)
        self._stop_flag, self._global_step = stop_flag, global_step
        self.fuse_steps, self.stack = fuse_steps, Stack()
        self._one_device = fuse_steps == 1 and not problem_of_one_thread(tf.distribute.get_strategy())

    @property
    def executor(self) -> str:
        """The executor that the config names; auto only if this trainer has a choice."""
        name: str = getattr(self._config.runtime, "executor", "default")
        return name if name != "auto" or self._one_device else "default"

    def make(self) -> TrainLoop | FusedLoop:
        """Returns a new loop that is not traced yet."""
        if self.fuse_steps > 1:
            return FusedLoop(*self._parts, self.stack, self.fuse_steps)
        return TrainLoop(
            *self._parts,
            after_step=lambda: self._stop_flag.agree(self._global_step),
            use_tf_function=self._config.trainer.train_tf_function,
            use_tf_while_loop=self._config.trainer.train_tf_while_loop,
            exact_waits=self.executor != "default",
        )

    def executor_to_trace_for(self, chosen: str, weights: Sequence[Any]) -> str:
        """Returns the executor that a loop is traced for first: TensorFlow gives branches another form for one thread.

        Args:
          chosen: the executor of the loop; auto: it is not chosen yet.
          weights: the trainable variables.
        """
        if chosen != "auto":
            return chosen
        return "single_threaded" if executor_by_weights(weights, self._batch_size) is None else "default"

    def decided(
        self, loop: TrainLoop | FusedLoop, graph: tf.Graph | None, chosen: str, weights: Sequence[Any]
    ) -> tuple[TrainLoop | FusedLoop, str]:
        """Returns the loop to run, and its executor. Eager, before the first step.

        Args:
          loop: traced for the executor of `executor_to_trace_for`.
          graph: of the loop; None where it is not compiled.
          chosen: the executor of the loop; auto: it is chosen now, by the size of a step.
          weights: the trainable variables.
        """
        if self.fuse_steps > 1:
            tell_dropped_assertions(graph)
        if chosen != "auto":
            return loop, chosen
        by_weights = executor_by_weights(weights, self._batch_size)
        choice = by_weights or executor_by_graph(graph, self._batch_size)
        _LOG.info("runtime.executor=auto: %s, since %s", choice.name, choice.reason)
        if by_weights is None and choice.name == "default":
            loop = self.make()  # the first one was traced for one thread
        return loop, choice.name

    @property
    def _batch_size(self) -> int:
        data = getattr(self._config.task, "train_data", None)
        return int(getattr(data, "global_batch_size", 0))
