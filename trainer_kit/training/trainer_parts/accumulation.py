"""Accumulation: trains on a batch in several micro-batches that have one update (trainer.accumulate_steps)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.accumulation import GradientAccumulator, GradientSums
from trainer_kit.optimizers.named_optimizers import NamedOptimizers
from trainer_kit.training.checks.accumulating import check_accumulating, warn_of_batch_normalization
from trainer_kit.training.loops.micro_batches import MicroBatches


class Accumulation:
    """Splits the batch of each training step into micro-batches. Created in the scope of the strategy.

    Args:
      trainer: The trainer.
      step: A function of a replica's batch, an optimizer and the batch's share that runs a training step.
      metrics: A function that returns the variables of the training metrics.
      fused: Whether steps are fused in a program of XLA.

    Attributes:
      steps: The number of micro-batches in a batch; 1: batches are not split.

    Raises:
      UsageError, ConfigError: when the config asks for micro-batches and they cannot work.
    """

    def __init__(
        self, trainer: Any, step: Callable[..., None], metrics: Callable[[], Sequence[Any]], fused: bool
    ) -> None:
        self._trainer, self._step, self._metrics, self._fused = trainer, step, metrics, fused
        self.steps: int = getattr(trainer.config.trainer, "accumulate_steps", 1) if trainer.trains else 1
        self._sums = GradientSums()
        self._is_used = False
        if self.steps > 1:
            check_accumulating(trainer, step, self.steps)
            warn_of_batch_normalization(trainer.model, self.steps)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the gradients' sums, which no checkpoint needs."""
        return list(self._sums.variables.values())

    def check_used(self) -> None:
        """Raises UsageError when a step was not split: a subclass has a train_step of its own.

        Runs eagerly, on the host.
        """
        if self.steps > 1 and not self._is_used:
            name = self._trainer.class_name
            raise UsageError(
                f"trainer.accumulate_steps={self.steps}: {name}.train_step does not call super().train_step, which "
                "splits the batch; call it, or set trainer.accumulate_steps=1"
            )

    @tf.autograph.experimental.do_not_convert
    def train(self, inputs: Any, options: Any) -> None:
        """Trains on a batch, with one update; runs in graph, in cross-replica context.

        Args:
          inputs: The batch, as strategy.run takes it.
          options: The options of strategy.run.
        """
        self._is_used = True
        self._sums.calls = {}
        batches = MicroBatches(
            self.steps, self._trainer.strategy, self._part_step, self._update, self._metrics, options, self._fused
        )
        batches(inputs)

    @tf.autograph.experimental.do_not_convert
    def _part_step(self, part: Any, share: Any, first: Any) -> None:
        optimizer = self._trainer.optimizer
        if not isinstance(optimizer, Mapping):
            self._step(part, GradientAccumulator(self._sums, optimizer, share, first), share)
            return
        parts = {name: GradientAccumulator(self._sums, one, share, first) for name, one in optimizer.items()}
        self._step(part, optimizer.replaced(parts) if isinstance(optimizer, NamedOptimizers) else parts, share)

    @tf.autograph.experimental.do_not_convert
    def _update(self) -> None:
        if not self._sums.calls:
            raise UsageError(
                f"trainer.accumulate_steps: {type(self._trainer.task).__name__}.train_step applied no gradients "
                "through the optimizer that it was called with; call trainer_kit.apply_gradients(optimizer, ...) with "
                "that argument"
            )
        self._sums.update()
