"""Loss scaling for float16, dynamic or fixed, correct under several replicas.

A step whose gradients are not finite on any replica is skipped on all of them: weights, slots and
the optimizer's iterations stay, and a dynamic scale is halved. The trainer's global_step counts
such a step all the same: it counts batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.optimizers.gradients import Gradient, clip_and_apply, get_values, scale_gradient
from trainer_kit.typing import Variable


@keras.saving.register_keras_serializable("trainer_kit")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras' LossScaleOptimizer with a check over all replicas.

    Its scale is a variable from the start. Keras' own class looks for infinities on the first
    replica only, and a loss scaled before it is built keeps the initial scale permanently.

    Args:
      inner_optimizer: The optimizer that updates the weights. Its attribute `clipping` applies to
        unscaled gradients.
      initial_scale: The loss scale at the start. If not dynamic, at every step.
      dynamic_growth_steps: The number of steps without a skip after which a dynamic scale is
        doubled.
      dynamic: Whether the scale changes. A scale that changes is at least 1.
      name: The name of the optimizer.
    """

    def __init__(
        self,
        inner_optimizer: keras.Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        dynamic: bool = True,
        name: str = "LossScale",
    ) -> None:
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name)
        self.is_dynamic = dynamic
        self._get_built_variables: Callable[[], list[Variable]] = list
        self.step_counter = self.add_variable(
            (), "zeros", "int", name="step_counter", aggregation="only_first_replica"
        )
        self.dynamic_scale = self.add_variable(
            (),
            keras.initializers.Constant(initial_scale),
            "float32",
            name="dynamic_scale",
            aggregation="only_first_replica",
        )

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the inner optimizer's variables for `variables`; called in strategy scope."""
        # A list as an attribute would be tracked, and so be part of checkpoints.
        built_variables = list(variables)
        self._get_built_variables = lambda: built_variables
        self.inner_optimizer.build(variables)
        # Not Keras' LossScaleOptimizer.build, which would create the scale again.
        keras.optimizers.Optimizer.build(self, variables)

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns `loss` in float32, times the scale; runs eagerly or in graph, on a replica."""
        loss = tf.cast(loss, tf.float32)
        return loss * tf.convert_to_tensor(self.dynamic_scale)

    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> None:
        """Unscales, clips and applies the gradients of a scaled loss, or skips the step.

        Runs in a replica.

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

        scale = tf.convert_to_tensor(self.dynamic_scale)
        inverse = 1.0 / scale
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(grads, all_variables, strict=True)
            if gradient is not None
        ]
        unscaled = [scale_gradient(gradient, inverse) for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]

        def update(
            strategy: tf.distribute.Strategy, finite: tf.Tensor, gradients: list[Gradient]
        ) -> None:
            def step() -> tf.Tensor:
                strategy.run(
                    lambda replica: clip_and_apply(self.inner_optimizer, replica, variables),
                    (gradients,),
                )
                return tf.constant(True)

            # All replicas have the same value.
            local_values = strategy.experimental_local_results(finite)
            finite = local_values[0]
            # The branch is in cross-replica context: TensorFlow forbids a branch of one replica in
            # which replicas meet.
            tf.cond(finite, step, lambda: tf.constant(False))
            self._adapt(finite)

        not_finite = []
        for gradient in unscaled:
            values = get_values(gradient)
            is_finite = tf.reduce_all(tf.math.is_finite(values))
            not_finite.append(tf.cast(~is_finite, tf.float32))

        # The replicas count together, so that all of them update the variables, or none.
        context = tf.distribute.get_replica_context()
        count = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.add_n(not_finite))
        context.merge_call(update, args=(count == 0, unscaled))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config = super().get_config()
        return {**config, "dynamic": self.is_dynamic}

    def _adapt(self, finite: tf.Tensor) -> None:
        """Halves the scale after a step that was not finite, doubles it after enough that were."""
        if not self.is_dynamic:
            return

        scale = tf.convert_to_tensor(self.dynamic_scale)
        counted_steps = tf.convert_to_tensor(self.step_counter)
        counted_steps += 1
        good_steps = tf.where(finite, counted_steps, 0)

        is_due = good_steps >= self.dynamic_growth_steps
        # Twice the scale may be infinite.
        doubled = 2.0 * scale
        grows = is_due & tf.math.is_finite(doubled)
        grown = tf.where(grows, doubled, scale)
        halved = tf.maximum(scale / 2.0, 1.0)
        new_scale = tf.where(finite, grown, halved)
        self.dynamic_scale.assign(new_scale)

        no_steps = tf.zeros_like(good_steps)
        new_count = tf.where(grows, no_steps, good_steps)
        self.step_counter.assign(new_count)
