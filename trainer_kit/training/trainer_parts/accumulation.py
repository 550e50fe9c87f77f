"""Accumulation: trains on a batch in several micro-batches that have one update (trainer.accumulate_steps)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.accumulation import DiscardedGradients, GradientSums
from trainer_kit.optimizers.named_optimizers import NamedOptimizers
from trainer_kit.training.checks.accumulating import check_accumulating, warn_of_batch_normalization
from trainer_kit.training.loops.micro_batches import MicroBatches
from trainer_kit.training.trainer_parts.micro_batch_trials import MicroBatchTrials

# A loop over at most so many micro-batches of a model with at most so many variables is unrolled. The time for tracing
# grows with both, and the cost of a loop matters only where a step is short.
_MOST_PARTS, _MOST_VARIABLES = 8, 32


class Accumulation:
    """Splits the batch of each training step into micro-batches. Created in the scope of the strategy.

    Args:
      trainer: The trainer.
      step: A function of a replica's batch, an optimizer and the batch's share that runs a training step.
      metrics: A function that returns the variables of the training metrics.
      fused: Whether steps are fused in a program of XLA.

    Attributes:
      steps: The number of micro-batches in a batch; auto until it is chosen. 1: batches are not split.

    Raises:
      UsageError, ConfigError: when the config asks for micro-batches and they cannot work.
    """

    def __init__(
        self, trainer: Any, step: Callable[..., None], metrics: Callable[[], Sequence[Any]], fused: bool
    ) -> None:
        self._trainer, self._step, self._metrics, self._fused = trainer, step, metrics, fused
        self._strategy = trainer.strategy
        self.steps: int | str = getattr(trainer.config.trainer, "accumulate_steps", 1) if trainer.trains else 1
        self._sums: dict[str, GradientSums] = {}  # by the name of the optimizer; "" for a single one
        self._is_prepared = self._is_used = False
        if self.steps != 1:
            check_accumulating(trainer, step, self.steps)
            self._renew_sums()

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the gradients' sums, which no checkpoint needs."""
        return [variable for sums in self._sums.values() for variable in sums.variables]

    def prepare(self, iterator: Any) -> None:
        """Chooses the number of micro-batches if it is auto, and warns of layers that see them.

        Runs eagerly, on the host.

        Args:
          iterator: The iterator over the training data, from which nothing is taken.
        """
        if self._is_prepared or self.steps == 1:
            return
        self._is_prepared = True
        if self.steps == "auto":
            trials = MicroBatchTrials(self._trainer, self._trial_step, iterator.element_spec, self._fused)
            self.steps = trials.smallest_that_fits()
        if self.steps != 1:
            warn_of_batch_normalization(self._trainer.model, int(self.steps))

    def check_used(self) -> None:
        """Raises UsageError when a step was not split: a subclass has a train_step of its own.

        Runs eagerly, on the host.
        """
        if self.steps != 1 and not self._is_used:
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
        self._renew_sums()
        unrolled = self._is_unrolled()
        for sums in self._sums.values():
            sums.begin(as_tensors=unrolled and self._strategy.num_replicas_in_sync == 1)
        batches = MicroBatches(
            int(self.steps), self._strategy, self._part_step, self._update, self._metrics, options,
            in_xla=self._fused, unrolled=unrolled,
        )  # fmt: skip
        batches(inputs)

    def _is_unrolled(self) -> bool:
        """Whether the graph gets a copy of the step for each micro-batch; XLA would compile each copy."""
        is_small = len(self._trainer.model.trainable_variables) <= _MOST_VARIABLES and int(self.steps) <= _MOST_PARTS
        return is_small and not (self._fused or self._trainer.config.runtime.enable_xla)

    @tf.autograph.experimental.do_not_convert
    def _part_step(self, part: Any, share: Any, first: Any) -> list[tf.Tensor]:
        self._run(self._sums, part, share, first)
        return [tensor for sums in self._sums.values() for tensor in sums.tensors]

    @tf.autograph.experimental.do_not_convert
    def _update(self) -> None:
        used = [sums for sums in self._sums.values() if sums.has_gradients]
        if not used:
            raise UsageError(
                f"trainer.accumulate_steps: {type(self._trainer.task).__name__}.train_step applied no gradients "
                "through the optimizer that it was called with; call trainer_kit.apply_gradients(optimizer, ...) with "
                "that argument"
            )
        for sums in used:
            sums.update()

    def _trial_step(self, parts: int) -> Callable[[Any], None]:
        """Returns a function that runs the forward and backward pass of a micro-batch on a replica, without an update.

        Args:
          parts: The number of micro-batches in a batch. With several, the trial has the sums of gradients, too.
        """
        alone = {name: DiscardedGradients(sums.optimizer) for name, sums in self._sums.items()}
        sums = self._sums if parts > 1 else alone
        for one in sums.values():
            one.begin()
        return tf.autograph.experimental.do_not_convert(lambda part: self._run(sums, part, 1.0, True))

    def _run(self, sums: Mapping[str, GradientSums], part: Any, share: Any, first: Any) -> None:
        parts = {name: one.part(share, first) for name, one in sums.items()}
        given = self._trainer.optimizer
        groups = given.replaced(parts) if isinstance(given, NamedOptimizers) else parts
        self._step(part, parts.get("", groups), share)

    def _renew_sums(self) -> None:
        """Creates new sums for optimizers that have been replaced."""
        given = self._trainer.optimizer
        optimizers = given if isinstance(given, Mapping) else {"": given}
        known = {name: sums.optimizer for name, sums in self._sums.items()}
        if known.keys() != optimizers.keys() or any(known[name] is not one for name, one in optimizers.items()):
            self._sums = {name: GradientSums(one) for name, one in optimizers.items()}
