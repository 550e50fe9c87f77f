"""Warm-ups: what a learning rate does before its schedule takes over; values as in TF Model Garden's lr_schedule.

A warm-up replaces the schedule's first steps; it does not delay it. Both kinds run eagerly and in graph, on host and
replica, take an integer step and return a float32 scalar tensor.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule as Schedule


class _Warmup(Schedule):
    """What warm-ups share: `warmup_steps` steps (at least 1), then `after`, a schedule or a constant."""

    def __init__(self, after: Schedule | float, warmup_steps: int) -> None:
        super().__init__()
        self.after = after
        self.warmup_steps = warmup_steps
        with tf.init_scope():
            self.final = float(_value(after, warmup_steps))

    def _then_after(self, rising: tf.Tensor, step: Any) -> tf.Tensor:
        """Returns `rising` below warmup_steps, else the value of `after` at `step`."""
        step = tf.convert_to_tensor(step)
        return tf.where(step < self.warmup_steps, rising, _value(self.after, step))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        after = keras.optimizers.schedules.serialize(self.after) if isinstance(self.after, Schedule) else self.after
        return {"after": after, "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Warmup:
        """Returns the warm-up that `get_config` describes."""
        after = config.pop("after")
        return cls(after if isinstance(after, float) else keras.optimizers.schedules.deserialize(after), **config)


@keras.saving.register_keras_serializable("trainer_kit")
class LinearWarmup(_Warmup):
    """Rises in a straight line from warmup_learning_rate to the value of `after` at step warmup_steps."""

    def __init__(self, after: Schedule | float, warmup_steps: int, warmup_learning_rate: float = 0.0) -> None:
        super().__init__(after, warmup_steps)
        self.warmup_learning_rate = warmup_learning_rate

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        part = tf.cast(step, tf.float32) / self.warmup_steps
        return self._then_after(self.warmup_learning_rate + part * (self.final - self.warmup_learning_rate), step)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "warmup_learning_rate": self.warmup_learning_rate}


@keras.saving.register_keras_serializable("trainer_kit")
class PolynomialWarmup(_Warmup):
    """(max(step, 1) / warmup_steps) ** power times the value of `after` at step warmup_steps."""

    def __init__(self, after: Schedule | float, warmup_steps: int, power: float = 1.0) -> None:
        super().__init__(after, warmup_steps)
        self.power = power

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        part = tf.maximum(tf.cast(step, tf.float32), 1.0) / self.warmup_steps
        return self._then_after(self.final * tf.pow(part, self.power), step)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "power": self.power}


def _value(rate: Schedule | float, step: Any) -> tf.Tensor:
    return tf.cast(rate(step) if isinstance(rate, Schedule) else rate, tf.float32)
