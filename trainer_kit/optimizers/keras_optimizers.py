"""Keras' optimizers with a rule for which variables get weight decay.

Without weight decay each does exactly what Keras' class of the same name does.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.optimizers.weight_decay import DecoupledDecayMixin
from trainer_kit.typing import FloatLike, Variable


@keras.saving.register_keras_serializable("trainer_kit")
class AdamW(DecoupledDecayMixin, keras.optimizers.AdamW):
    """Keras' AdamW with a rule for which variables get weight decay."""


@keras.saving.register_keras_serializable("trainer_kit")
class Nadam(DecoupledDecayMixin, keras.optimizers.Nadam):
    """Keras' Nadam with a rule for which variables get weight decay."""


@keras.saving.register_keras_serializable("trainer_kit")
class Adamax(DecoupledDecayMixin, keras.optimizers.Adamax):
    """Keras' Adamax with a rule for which variables get weight decay."""


class _AdadeltaOfAnyGradient(keras.optimizers.Adadelta):
    def update_step(self, gradient: Gradient, variable: Variable, learning_rate: FloatLike) -> None:
        # XLA cannot compile Keras' update by sparse gradients.
        dense = tf.convert_to_tensor(gradient)
        super().update_step(dense, variable, learning_rate)


@keras.saving.register_keras_serializable("trainer_kit")
class Adadelta(DecoupledDecayMixin, _AdadeltaOfAnyGradient):
    """Keras' Adadelta with a rule for which variables get weight decay.

    With XLA it takes sparse gradients, too.
    """


@keras.saving.register_keras_serializable("trainer_kit")
class Ftrl(DecoupledDecayMixin, keras.optimizers.Ftrl):
    """Keras' FTRL with a rule for which variables get weight decay."""


@keras.saving.register_keras_serializable("trainer_kit")
class Lion(DecoupledDecayMixin, keras.optimizers.Lion):
    """Keras' Lion with a rule for which variables get weight decay."""


@keras.saving.register_keras_serializable("trainer_kit")
class Lamb(DecoupledDecayMixin, keras.optimizers.Lamb):
    """Keras' Lamb with a rule for which variables get weight decay.

    Keras subtracts the decay before the update. In the paper (arXiv 1904.00962) and in Model Garden
    it is part of the update, and the trust ratio scales it. Without weight decay both are equal.
    """


class _AdafactorOfAnyModel(keras.optimizers.Adafactor):
    def build(self, variables: Sequence[Variable]) -> None:
        # Adafactor names its own variables after those that it trains, and refuses a "/". tf_keras
        # gives variables names such as "a/b:0".
        flat_variables = []
        for variable in variables:
            is_native = isinstance(variable, tf.Variable)
            if is_native and "/" in variable.name:
                path = variable_path(variable)
                name = path.replace("/", "_")
                trainable = variable.trainable
                variable = keras.Variable(variable, name=name, trainable=trainable)
            flat_variables.append(variable)
        super().build(flat_variables)


@keras.saving.register_keras_serializable("trainer_kit")
class Adafactor(DecoupledDecayMixin, _AdafactorOfAnyModel):
    """Keras' Adafactor with a rule for which variables get weight decay.

    It takes variables of tf_keras models, too.
    """


@keras.saving.register_keras_serializable("trainer_kit")
class Muon(DecoupledDecayMixin, keras.optimizers.Muon):
    """Keras' Muon with a rule for which variables get weight decay.

    Variables that Muon leaves to Adam decay by `adam_weight_decay`.
    """

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the optimizer's variables for `variables`; called in strategy scope.

        Raises:
          UsageError: when a variable is not of Keras 3, so that Keras' Muon finds no path in it.
        """
        for variable in variables:
            if not isinstance(variable, keras.Variable):
                path = variable_path(variable)
                raise UsageError(
                    f"optimizer.type=muon is for models of Keras 3, and {path}"
                    " is a tf.Variable; choose another optimizer, such as adamw"
                )
        super().build(variables)

    def get_decay_rate(self, index: int) -> float:
        """Returns the weight decay of the variable at `index`, if the rule says that it decays.

        Called after `build`.
        """
        # Only variables that Muon leaves to Adam have a velocity of Adam.
        is_for_adam = self.adam_velocities[index] is not None
        rate = self.adam_weight_decay if is_for_adam else self.weight_decay
        return float(rate or 0.0)
