"""Schedule-free AdamW, which needs no decay of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.per_variable import SlotOptimizer
from trainer_kit.optimizers.rate_schedules import Rate
from trainer_kit.optimizers.weight_decay import DecayRuleMixin
from trainer_kit.typing import FloatLike, Variable


class _ScheduleFree(SlotOptimizer):
    """Schedule-free Adam without weight decay; see ScheduleFreeAdamW."""

    slot_names = ("momentum", "velocity")
    argument_names = ("beta_1", "beta_2", "epsilon", "warmup_steps")

    def __init__(
        self,
        learning_rate: Rate,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.warmup_steps = warmup_steps

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the slots for `variables`, and starts the fast weights at their values.

        Called in strategy scope.
        """
        if not self.built:
            super().build(variables)
            for slot, variable in zip(self.slots[0], variables, strict=True):
                self.assign(slot, tf.convert_to_tensor(variable))


@keras.saving.register_keras_serializable("trainer_kit")
class ScheduleFreeAdamW(DecayRuleMixin, _ScheduleFree):
    """Schedule-free AdamW (Defazio et al., arXiv 2405.15682), with the arguments of Keras' class.

    It has three weights for each one: fast weights z (the slot "momentum"), their mean x, and the
    weights of the model y = (1 - beta_1) * z + beta_1 * x, at which the gradient is taken. Step t,
    with the velocity v of Adam:

        z = z - learning_rate * (gradient / (sqrt(v / (1 - beta_2 ** t)) + epsilon)
                                 + weight_decay * y)
        x = (1 - 1 / t) * x + z / t

    Keras' own class (3.15) has three faults on TensorFlow. It reads the fast weights after it has
    changed them where the formula needs those before. It starts at the weights as they were when
    the optimizer was built, before a checkpoint was loaded into the model. It decays the mean and
    never the fast weights.
    """

    def update_step(self, gradient: Gradient, variable: Variable, learning_rate: FloatLike) -> None:
        """Updates one variable; on each replica, with gradients that are summed over replicas."""
        dtype = variable.dtype
        dense = tf.convert_to_tensor(gradient)
        gradient = tf.cast(dense, dtype)
        step = tf.cast(self.iterations + 1, dtype)
        rate = tf.cast(learning_rate, dtype)
        if self.warmup_steps:
            share_of_warmup = step / self.warmup_steps
            rate *= tf.minimum(share_of_warmup, 1.0)

        # Weights may be loaded after `build`, so the first step takes them from the model.
        fast_slot, velocity = self.get_slots(variable)
        weight = tf.convert_to_tensor(variable)
        slot_value = tf.convert_to_tensor(fast_slot)
        is_first = step == 1.0
        old_fast = tf.where(is_first, weight, slot_value)

        # The weight is y, of which the mean x and the fast weight z are parts.
        fast_share = 1.0 - self.beta_1
        mean_part = weight - fast_share * old_fast
        mean = mean_part / self.beta_1

        square = tf.square(gradient)
        difference = square - velocity
        growth = difference * (1.0 - self.beta_2)
        self.assign_add(velocity, growth)

        # The velocity starts at 0. Divided by the correction it is a mean of the squares so far.
        beta_2 = tf.cast(self.beta_2, dtype)
        correction = 1.0 - beta_2**step
        mean_square = velocity / correction
        size = tf.sqrt(mean_square) + self.epsilon
        direction = gradient / size
        weight_decay = self.decay_rates.get_value(self, variable)
        if weight_decay:
            direction += weight_decay * weight

        new_fast = old_fast - rate * direction
        distance = new_fast - mean
        mean += distance / step
        fast_part = fast_share * new_fast
        new_weight = fast_part + self.beta_1 * mean
        self.assign(fast_slot, new_fast)
        self.assign(variable, new_weight)
