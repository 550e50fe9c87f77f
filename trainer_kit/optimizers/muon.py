"""Muon: steps of matrices whose singular values are all about equal; Adam for all other variables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from trainer_kit.distribution.keras_internals import variable_index
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.optimizers.weight_decay import DecaysByRule


class _Muon(keras.optimizers.Optimizer):
    """Muon without weight decay; see Muon."""

    defaults: ClassVar[dict[str, Any]] = {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "muon_a": 3.4445,
        "muon_b": -4.7750,
        "muon_c": 2.0315,
        "rms_rate": 0.2,
        "exclude_layers": (),
        "exclude_embeddings": True,
        "adam_beta_1": 0.9,
        "adam_beta_2": 0.999,
        "epsilon": 1e-7,
        "adam_lr_ratio": 1.0,
        "adam_weight_decay": None,
    }

    def __init__(self, learning_rate: Any, **kwargs: Any) -> None:
        chosen = {name: kwargs.pop(name, default) for name, default in self.defaults.items()}
        super().__init__(learning_rate, **kwargs)
        for name, value in chosen.items():
            setattr(self, name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the slots for `variables`: the velocity only of those that Adam updates; called in strategy scope."""
        if self.built:
            return
        super().build(variables)
        self.momentums = [self.add_variable_from_reference(one, name="momentum") for one in variables]
        self.adam_velocities = [
            self.add_variable_from_reference(one, name="velocity") if self._is_for_adam(one) else None
            for one in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable; on each replica, with gradients that are summed over them."""
        index = variable_index(self, variable)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        if self.adam_velocities[index] is None:
            self._update_by_muon(gradient, variable, rate, self.momentums[index])
        else:
            rate *= self.adam_lr_ratio
            self._update_by_adam(gradient, variable, rate, self.momentums[index], self.adam_velocities[index])

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        chosen = {name: getattr(self, name) for name in self.defaults}
        return {**super().get_config(), **chosen, "exclude_layers": list(self.exclude_layers)}

    def _is_for_adam(self, variable: Any) -> bool:
        path = variable_path(variable)
        is_embedding = self.exclude_embeddings and "embedding" in path.lower()
        return len(variable.shape) != 2 or is_embedding or any(re.search(one, path) for one in self.exclude_layers)

    def _update_by_muon(self, gradient: tf.Tensor, variable: Any, rate: tf.Tensor, slot: Any) -> None:
        momentum = self.momentum * tf.convert_to_tensor(slot) + gradient
        direction = self._orthogonal(gradient + self.momentum * momentum if self.nesterov else momentum)
        size = math.sqrt(max(variable.shape)) * self.rms_rate if self.rms_rate else 1.0
        self.assign(slot, momentum)
        self.assign_sub(variable, rate * size * direction)

    def _orthogonal(self, matrix: tf.Tensor) -> tf.Tensor:
        """Returns a matrix with the singular vectors of `matrix` and singular values near 1, by Newton-Schulz."""
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = tf.transpose(matrix) if is_tall else matrix
        x = x / (tf.norm(x) + 1e-7)
        for _ in range(self.ns_steps):
            gram = tf.matmul(x, x, transpose_b=True)
            x = self.muon_a * x + (self.muon_b * gram + self.muon_c * gram @ gram) @ x
        return tf.transpose(x) if is_tall else x

    def _update_by_adam(
        self, gradient: tf.Tensor, variable: Any, rate: tf.Tensor, momentum: Any, velocity: Any
    ) -> None:
        step = tf.cast(self.iterations + 1, variable.dtype)
        left_1, left_2 = (tf.cast(beta, variable.dtype) ** step for beta in (self.adam_beta_1, self.adam_beta_2))
        self.assign_add(momentum, (gradient - momentum) * (1.0 - self.adam_beta_1))
        self.assign_add(velocity, (tf.square(gradient) - velocity) * (1.0 - self.adam_beta_2))
        rate *= tf.sqrt(1.0 - left_2) / (1.0 - left_1)
        self.assign_sub(variable, rate * momentum / (tf.sqrt(velocity) + self.epsilon))


@keras.saving.register_keras_serializable("trainer_kit")
class Muon(DecaysByRule, _Muon):
    """Muon (Jordan et al. 2024; arXiv 2502.16982), with the arguments and values of Keras' class from Keras 3.13 on.

    Keras 3.12, the last one for Python 3.10, has another form of it. Variables that Muon leaves to Adam decay by
    `adam_weight_decay`.
    """

    def decay_rate(self, index: int) -> float:
        """Returns the weight decay of the variable at `index`, if the rule says that it decays; after `build`."""
        is_for_adam = self.adam_velocities[index] is not None
        return float((self.adam_weight_decay if is_for_adam else self.weight_decay) or 0.0)
