"""Keras' Muon with a rule for which variables get weight decay. Keras has this form of Muon from 3.13 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.optimizers.weight_decay import DecaysByRule


@keras.saving.register_keras_serializable("trainer_kit")
class Muon(DecaysByRule, keras.optimizers.Muon):
    """Keras' Muon with a rule for which variables get weight decay.

    Variables that Muon leaves to Adam decay by `adam_weight_decay`.
    """

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables for `variables`; called in strategy scope.

        Raises:
          UsageError: when a variable is not of Keras 3, so that Keras' Muon finds no path in it.
        """
        others = [variable for variable in variables if not isinstance(variable, keras.Variable)]
        if others:
            raise UsageError(
                f"optimizer.type=muon is for models of Keras 3, and {variable_path(others[0])} is a tf.Variable; "
                "choose another optimizer, such as adamw"
            )
        super().build(variables)

    def decay_rate(self, index: int) -> float:
        """Returns the weight decay of the variable at `index`, if the rule says that it decays; after `build`."""
        is_for_adam = self.adam_velocities[index] is not None
        return float((self.adam_weight_decay if is_for_adam else self.weight_decay) or 0.0)
