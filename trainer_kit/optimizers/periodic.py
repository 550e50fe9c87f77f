"""PeriodicOptimizer: updates the weights in every n-th step, correct under several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.optimizers import gradients as updates
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.rate_schedules import Rate
from trainer_kit.typing import Variable


class PeriodicOptimizer(keras.optimizers.Optimizer):
    """Calls another optimizer in the last step of each period.

    A step is one call of `apply_gradients`. The other optimizer's iterations, and so its
    learning-rate schedule, count updates.

    Args:
      inner_optimizer: The optimizer that updates the weights, with its clipping and its loss scale.
      period: The number of steps in a period.
      accumulate: Whether the update takes the mean of the gradients of all steps of the period.
        False takes the gradients of its last step.
      name: The name of the optimizer.
    """

    def __init__(
        self,
        inner_optimizer: keras.Optimizer,
        period: int,
        accumulate: bool = False,
        name: str = "Periodic",
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.period = period
        self.accumulate = accumulate
        self.steps_done = self.add_variable(
            (), "zeros", "int64", name="steps_done", aggregation="only_first_replica"
        )
        self._get_built_variables: Callable[[], list[Variable]] = list
        # By the id of the variable.
        self._sums: dict[int, keras.Variable] = {}

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the inner optimizer's variables for `variables`, and the sums of their gradients.

        Called in strategy scope.
        """
        if self.built:
            return

        # A list as an attribute would be tracked, and so be part of checkpoints.
        built_variables = list(variables)
        self._get_built_variables = lambda: built_variables
        self.inner_optimizer.build(built_variables)
        super().build(built_variables)

        if self.accumulate:
            self._sums = {
                id(variable): self.add_variable_from_reference(variable, name="gradient_sum")
                for variable in built_variables
            }

    @property
    def variables(self) -> list[keras.Variable]:
        """The step counter and the sums, then the variables of the inner optimizer."""
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Rate) -> None:
        self.inner_optimizer.learning_rate = rate

    @property
    def iterations(self) -> keras.Variable:
        """The number of updates."""
        return self.inner_optimizer.iterations

    @property
    def dynamic_scale(self) -> keras.Variable | None:
        """The loss scale of the inner optimizer; None if it has none."""
        return getattr(self.inner_optimizer, "dynamic_scale", None)

    @property
    def uses_every_gradient(self) -> bool:
        """Whether the gradients of all steps are used."""
        return self.accumulate

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss times the inner optimizer's loss scale, if it has one; in a replica."""
        return updates.scale_loss(self.inner_optimizer, loss)

    @tf.autograph.experimental.do_not_convert
    def needs_gradients(self) -> tf.Tensor:
        """Returns whether this step's gradients are used, a bool scalar.

        Runs eagerly or in graph.
        """
        step = tf.convert_to_tensor(self.steps_done) + 1
        is_last = step % self.period == 0
        return tf.logical_or(self.accumulate, is_last)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> None:
        """Counts a step, and updates the weights if it is the last one of its period; in a replica.

        Args:
          grads: The gradients of this replica. None for variables that keep their values.
          trainable_variables: The variables, one for each gradient. None means those it was built
            with.
        """
        if trainable_variables is None:
            trainable_variables = self._get_built_variables()
        all_variables = list(trainable_variables)
        if not self.built:
            self.build(all_variables)

        pairs = [
            (gradient, variable)
            for gradient, variable in zip(grads, all_variables, strict=True)
            if gradient is not None
        ]
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]

        context = tf.distribute.get_replica_context()
        if self.accumulate:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            # Summed, the gradients are the same on all replicas, and checkpoints exact.
            if context.num_replicas_in_sync > 1:
                gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

        def step(strategy: tf.distribute.Strategy, gradients: list[Gradient]) -> None:
            self._step(strategy, gradients, variables)

        context.merge_call(step, args=(gradients,))

    def _step(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> None:
        """Counts a step, and updates the weights in the last step of a period.

        Runs in cross-replica context, where branches are allowed.
        """
        steps_done = tf.convert_to_tensor(self.steps_done) + 1
        self.steps_done.assign(steps_done)

        sums: list[keras.Variable] = []
        if self.accumulate:
            sums = [self._sums[id(variable)] for variable in variables]
            for total, gradient in zip(sums, gradients, strict=True):
                strategy.extended.update(total.value, _add, args=(gradient,), group=False)

        # The replicas sum the gradients of an update, and here each has the sum of all.
        share = 1.0 / (self.period * strategy.num_replicas_in_sync)

        def mean_update() -> None:
            means = []
            for total in sums:
                means.append(updates.scale_gradient(tf.convert_to_tensor(total), share))
            updates.update_variables(self.inner_optimizer, means, variables)

        def update() -> tf.Tensor:
            if sums:
                strategy.run(mean_update)
            else:
                strategy.run(
                    lambda replica: updates.update_variables(
                        self.inner_optimizer, replica, variables
                    ),
                    (gradients,),
                )
            for total in sums:
                strategy.extended.update(total.value, _reset, group=False)
            return tf.constant(True)

        is_last = steps_done % self.period == 0
        tf.cond(is_last, update, lambda: tf.constant(False))


def _add(total: tf.Variable, gradient: tf.Tensor) -> Any:
    return total.assign_add(tf.cast(gradient, total.dtype))


def _reset(total: tf.Variable) -> Any:
    return total.assign(tf.zeros_like(total))
