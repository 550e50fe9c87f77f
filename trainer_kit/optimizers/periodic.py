"""PeriodicOptimizer: updates the weights in every n-th step, correct under several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.optimizers import gradients as updates


class PeriodicOptimizer(keras.optimizers.Optimizer):
    """Calls another optimizer in the last step of each period. A step is one call of `apply_gradients`.

    The other optimizer's iterations, and so its learning-rate schedule, count updates.

    Args:
      inner_optimizer: The optimizer that updates the weights, with its clipping and its loss scale.
      period: The number of steps in a period.
      accumulate: Whether the update takes the mean of the gradients of all steps of the period;
        false takes the gradients of its last step.
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
        self.inner_optimizer, self.period, self.accumulate = inner_optimizer, period, accumulate
        self.steps_done = self.add_variable(
            (), "zeros", "int64", name="steps_done", aggregation="only_first_replica"
        )
        self._get_built_variables: Callable[[], list[Any]] = list
        self._sums: dict[int, Any] = {}  # by the id of the variable

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables for `variables`, and the sums of their gradients; called in scope."""
        if self.built:
            return
        given = list(variables)
        self._get_built_variables = lambda: (
            given
        )  # a list as an attribute would be tracked, and so be part of checkpoints
        self.inner_optimizer.build(given)
        super().build(given)
        if self.accumulate:
            self._sums = {
                id(one): self.add_variable_from_reference(one, name="gradient_sum") for one in given
            }

    @property
    def variables(self) -> list[Any]:
        """The step counter and the sums, then the variables of the inner optimizer."""
        return [*super().variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.inner_optimizer.learning_rate = rate

    @property
    def iterations(self) -> Any:
        """The number of updates."""
        return self.inner_optimizer.iterations

    @property
    def dynamic_scale(self) -> Any:
        """The loss scale of the inner optimizer; None if it has none."""
        return getattr(self.inner_optimizer, "dynamic_scale", None)

    @property
    def uses_every_gradient(self) -> bool:
        """Whether the gradients of all steps are used."""
        return self.accumulate

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the inner optimizer's loss scale, if it has one; in a replica."""
        return updates.scale_loss(self.inner_optimizer, loss)

    @tf.autograph.experimental.do_not_convert
    def needs_gradients(self) -> tf.Tensor:
        """Returns whether this step's gradients will be used, a bool scalar; runs eagerly or in graph."""
        is_last = (tf.convert_to_tensor(self.steps_done) + 1) % self.period == 0
        return tf.logical_or(self.accumulate, is_last)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Counts a step, and updates the weights if it is the last one of its period; in a replica.

        Args:
          grads: The gradients of this replica; None for variables that keep their values.
          trainable_variables: The variables, one for each gradient; None means those it was built
            with.
        """
        given = list(
            self._get_built_variables() if trainable_variables is None else trainable_variables
        )
        if not self.built:
            self.build(given)
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(grads, given, strict=True)
            if gradient is not None
        ]
        gradients, variables = (
            [gradient for gradient, _ in pairs],
            [variable for _, variable in pairs],
        )
        context = tf.distribute.get_replica_context()
        if self.accumulate:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            if (
                context.num_replicas_in_sync > 1
            ):  # then the sums are the same everywhere, and checkpoints exact
                gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

        def step(strategy: tf.distribute.Strategy, gradients: Any) -> None:
            self._step(strategy, gradients, variables)

        context.merge_call(step, args=(gradients,))

    def _step(
        self, strategy: tf.distribute.Strategy, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Counts a step and updates the weights if it is time. In cross-replica context, where branches are allowed."""
        done = tf.convert_to_tensor(self.steps_done) + 1
        self.steps_done.assign(done)
        sums = [self._sums[id(variable)] for variable in variables] if self.accumulate else []
        for one, gradient in zip(sums, gradients if sums else (), strict=True):
            strategy.extended.update(one.value, _add, args=(gradient,), group=False)
        share = 1.0 / (self.period * strategy.num_replicas_in_sync)

        def mean_update() -> None:
            means = [updates.scale_gradient(tf.convert_to_tensor(one), share) for one in sums]
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
            for one in sums:
                strategy.extended.update(one.value, _reset, group=False)
            return tf.constant(True)

        tf.cond(done % self.period == 0, update, lambda: tf.constant(False))


def _add(total: tf.Variable, gradient: tf.Tensor) -> Any:
    return total.assign_add(tf.cast(gradient, total.dtype))


def _reset(total: tf.Variable) -> Any:
    return total.assign(tf.zeros_like(total))
