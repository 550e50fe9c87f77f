"""LARS: stochastic gradient descent with a learning rate for each layer, for large batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.per_variable import PerVariable, SlotOptimizer, variable_path
from trainer_kit.optimizers.rate_schedules import Rate
from trainer_kit.optimizers.weight_decay import DecayRule, DecayRuleFields, DecayRuleMixin
from trainer_kit.typing import FloatLike, Variable


class _LarsWithoutDecay(SlotOptimizer):
    """LARS without weight decay; see Lars."""

    slot_names = ("momentum",)
    argument_names = ("momentum", "eeta", "nesterov", "classic_momentum")

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float = 0.9,
        eeta: float = 0.001,
        nesterov: bool = False,
        classic_momentum: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, **kwargs)
        self.momentum = momentum
        self.eeta = eeta
        self.nesterov = nesterov
        self.classic_momentum = classic_momentum


@keras.saving.register_keras_serializable("trainer_kit")
class Lars(DecayRuleMixin, _LarsWithoutDecay):
    """LARS (You, Gitman and Ginsburg, arXiv 1708.03888).

    The arguments and formulas are those of TF Model Garden's class. With g = gradient +
    weight_decay * weight and trust(x) = eeta * |weight| / |x| (1 where a norm is 0):

        classic momentum:  velocity = momentum * velocity + learning_rate * trust(g) * g
                           update = velocity
        otherwise:         velocity = momentum * velocity + g
                           update = learning_rate * trust(velocity) * velocity

    The update is subtracted from the weight. With `nesterov`, momentum * (new velocity) + (the
    summand of the new velocity) takes the place of the velocity in the update.

    Args:
      *args: The learning rate, and arguments of the same names as fields of `LARSConfig`.
      adaptation_rule: The rule for which variables are adapted. Others have a trust of 1. Also as a
        dict.
      **kwargs: Further arguments, among them `weight_decay` and `decay_rule`.
    """

    def __init__(
        self,
        *args: Any,
        adaptation_rule: DecayRule | DecayRuleFields | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(adaptation_rule, DecayRule):
            adaptation_rule = DecayRule(**(adaptation_rule or {}))
        self.adaptation_rule = adaptation_rule

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the slots for `variables`; called in strategy scope."""
        if not self.built:
            super().build(variables)
            paths = [variable_path(variable) for variable in variables]
            adapted = [self.adaptation_rule.applies_to(path) for path in paths]
            self.is_adapted = PerVariable(tuple(adapted))
            # For the same rule, weight decay has warned already.
            is_same_rule = self.adaptation_rule == self.decay_rule
            if not self.weight_decay or not is_same_rule:
                self.adaptation_rule.warn_about_unused_patterns(paths, "layer adaptation")

    def update_step(self, gradient: Gradient, variable: Variable, learning_rate: FloatLike) -> None:
        """Updates one variable; on each replica, with gradients that are summed over replicas."""
        (slot,) = self.get_slots(variable)
        rate = tf.cast(learning_rate, variable.dtype)
        velocity = tf.convert_to_tensor(slot)

        dense = tf.convert_to_tensor(gradient)
        summand = tf.cast(dense, variable.dtype)
        weight_decay = self.decay_rates.get_value(self, variable)
        if weight_decay:
            summand += weight_decay * variable
        if self.classic_momentum:
            trust = self._trust(variable, summand)
            summand *= rate * trust

        velocity = self.momentum * velocity + summand
        update = velocity
        if self.nesterov:
            update = self.momentum * velocity + summand
        if not self.classic_momentum:
            trust = self._trust(variable, update)
            update *= rate * trust

        self.assign(slot, velocity)
        self.assign_sub(variable, update)

    def _trust(self, variable: Variable, step: tf.Tensor) -> FloatLike:
        """Returns the trust ratio, the factor of the step: eeta * |weight| / |step|, else 1."""
        if not self.is_adapted.get_value(self, variable):
            return 1.0
        weight = tf.convert_to_tensor(variable)
        weight_norm = tf.norm(weight)
        step_norm = tf.norm(step)
        has_ratio = (weight_norm > 0) & (step_norm > 0)
        ratio = tf.math.divide_no_nan(weight_norm, step_norm)
        trust = self.eeta * ratio
        return tf.where(has_ratio, trust, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        adaptation_rule = dataclasses.asdict(self.adaptation_rule)
        config = super().get_config()
        return {**config, "adaptation_rule": adaptation_rule}
