"""NewLoops: creates the training loops of a trainer, and chooses the executor that runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.executor import executor
from trainer_kit.inputs.fused_batches import tell_of_stacks
from trainer_kit.training.checks.model_and_config import problem_of_one_thread, tell_dropped_assertions
from trainer_kit.training.loops.executor_choice import loop_for_one_device
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

    def traced(
        self,
        loop: TrainLoop | FusedLoop,
        iterator: Any,
        chosen: str,
        weights: Sequence[Any],
        look_into: Callable[[tf.Graph | None], None],
    ) -> tuple[TrainLoop | FusedLoop, str]:
        """Returns a loop that has been traced and searched, and the executor that it was traced for. Eager.

        Args:
          loop: A loop that `make` has returned.
          iterator: An iterator over the training data.
          chosen: The executor; auto: it is chosen by the size of a step.
          weights: The trainable variables.
          look_into: A function that is called with the graph, or with None if the loop is not compiled.
        """
        if chosen == "auto":
            data = getattr(self._config.task, "train_data", None)
            loop, choice = loop_for_one_device(self.make, iterator, weights, getattr(data, "global_batch_size", 0))
            chosen = choice.name
            _LOG.info("runtime.executor=auto: %s, since %s", choice.name, choice.reason)
        with executor(chosen):
            graph = loop.graph(iterator)
        look_into(graph)
        if self.fuse_steps > 1:
            tell_dropped_assertions(graph)
            tell_of_stacks(iterator.element_spec, self.fuse_steps, self._config.trainer.steps_per_loop)
        return loop, chosen
