"""Learning-rate schedules that Keras does not have.

The values are those of TF Model Garden's lr_schedule where it has the same schedule. Each schedule
is a function of the step, eagerly or in graph, on host or replica: an integer (tensor, variable or
Python number) in, a float32 scalar tensor out. None branches in graph, so all compile with XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from trainer_kit.errors import UsageError
from trainer_kit.typing import FloatLike, IntLike

# A learning rate: a constant, or a schedule.
Rate: TypeAlias = float | Schedule


class FunctionSchedule(Schedule):
    """A schedule of a user's function, which maps a step to a learning rate.

    Keras cannot serialize it.
    """

    def __init__(self, function: Callable[[IntLike], FloatLike]) -> None:
        super().__init__()
        self.function = function

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        rate = self.function(step)
        return tf.cast(rate, tf.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"function": self.function}


@keras.saving.register_keras_serializable("trainer_kit")
class WithOffset(Schedule):
    """Another schedule, started `offset` steps later: schedule(step - offset).

    Args:
      schedule: The other schedule.
      offset: The number of steps.
      waits: Whether the rate before step `offset` is that of the schedule's step 0, for schedules
        that are infinite or no number below step 0. Otherwise it is the result of the schedule's
        formula there, as in Model Garden.
    """

    def __init__(self, schedule: Schedule, offset: int, waits: bool = False) -> None:
        super().__init__()
        self.schedule = schedule
        self.offset = offset
        self.waits = waits

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        own_step = tf.convert_to_tensor(step) - self.offset
        if self.waits:
            own_step = tf.maximum(own_step, 0)
        return self.schedule(own_step)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {
            "schedule": schedule,
            "offset": self.offset,
            "waits": self.waits,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WithOffset:
        """Returns the schedule that `get_config` describes."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        arguments = {**config, "schedule": schedule}
        return cls(**arguments)


@keras.saving.register_keras_serializable("trainer_kit")
class PowerDecay(Schedule):
    """initial_learning_rate * max(step, 1) ** power."""

    def __init__(self, initial_learning_rate: float, power: float) -> None:
        super().__init__()
        self.initial_learning_rate = initial_learning_rate
        self.power = power

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        step = tf.cast(step, tf.float32)
        power = _power(step, self.power)
        return self.initial_learning_rate * power

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "power": self.power,
        }


@keras.saving.register_keras_serializable("trainer_kit")
class PowerAndLinearDecay(Schedule):
    """PowerDecay, times a straight line down to 0 over the last part of the steps; 0 after them.

    Args:
      initial_learning_rate: The learning rate at step 1.
      total_decay_steps: The step at which the learning rate reaches 0, if linear_decay_fraction is
        not 0.
      power: The exponent of the step.
      linear_decay_fraction: The part of total_decay_steps in which the rate also falls linearly.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        total_decay_steps: int,
        power: float,
        linear_decay_fraction: float,
    ) -> None:
        super().__init__()
        self.initial_learning_rate = initial_learning_rate
        self.total_decay_steps = total_decay_steps
        self.power = power
        self.linear_decay_fraction = linear_decay_fraction

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        step = tf.cast(step, tf.float32)
        power = _power(step, self.power)
        rate = self.initial_learning_rate * power
        linear_steps = self.total_decay_steps * self.linear_decay_fraction
        if linear_steps > 0:
            remaining_steps = self.total_decay_steps - step
            remaining_share = remaining_steps / linear_steps
            rate *= tf.clip_by_value(remaining_share, 0.0, 1.0)
        return rate

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        names = ("initial_learning_rate", "total_decay_steps", "power", "linear_decay_fraction")
        return {name: getattr(self, name) for name in names}


@keras.saving.register_keras_serializable("trainer_kit")
class PowerDecayWithOffset(Schedule):
    """pre_offset_learning_rate up to step `offset`, after it PowerDecay of step - offset.

    The rate is never above pre_offset_learning_rate.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        power: float,
        offset: int,
        pre_offset_learning_rate: float,
    ) -> None:
        super().__init__()
        self.initial_learning_rate = initial_learning_rate
        self.power = power
        self.offset = offset
        self.pre_offset_learning_rate = pre_offset_learning_rate

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        own_step = tf.convert_to_tensor(step) - self.offset
        own_step = tf.cast(own_step, tf.float32)
        power = _power(own_step, self.power)
        rate = self.initial_learning_rate * power

        largest = self.pre_offset_learning_rate
        rate = tf.minimum(rate, largest)
        return tf.where(own_step > 0, rate, largest)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        names = ("initial_learning_rate", "power", "offset", "pre_offset_learning_rate")
        return {name: getattr(self, name) for name in names}


@keras.saving.register_keras_serializable("trainer_kit")
class StepCosineDecay(Schedule):
    """Falls or rises by half a cosine between the values of neighbouring boundaries.

    For each i it goes from values[i] at step boundaries[i] to values[i + 1] at boundaries[i + 1].
    From the last boundary on the rate stays at the last value (Model Garden's is NaN there). Before
    a first boundary above 0 it is the first value.

    Args:
      boundaries: Increasing steps. The first cosine begins at the first one, usually 0.
      values: The learning rates, one for each boundary.

    Raises:
      UsageError: when there are no values, or the numbers of boundaries and values differ.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        super().__init__()
        if not values or len(boundaries) != len(values):
            raise UsageError(
                f"step_cosine_with_offset was given {len(boundaries)} boundaries and {len(values)}"
                " values; give at least one of each, and as many values as boundaries"
            )
        self.boundaries = list(boundaries)
        self.values = list(values)

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        step = tf.cast(step, tf.float32)
        rate = tf.constant(self.values[0], tf.float32)
        piece_count = len(self.boundaries) - 1
        for index in range(piece_count):
            start = self.boundaries[index]
            end = self.boundaries[index + 1]

            # Before a first boundary above 0 no step of the first cosine has passed.
            steps_since = step - start
            if index == 0:
                least_steps = tf.minimum(step, 0.0)
                steps_since = tf.maximum(steps_since, least_steps)

            length = end - start
            angle = math.pi * steps_since / length
            cosine = tf.cos(angle)
            fraction = (1.0 + cosine) / 2.0
            start_value = self.values[index]
            end_value = self.values[index + 1]
            height = start_value - end_value
            piece = end_value + height * fraction
            if index > 0:
                piece = tf.where(step >= start, piece, rate)
            rate = piece

        last_boundary = self.boundaries[-1]
        last_value = self.values[-1]
        return tf.where(step >= last_boundary, last_value, rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


@keras.saving.register_keras_serializable("trainer_kit")
class OneCycle(Schedule):
    """The 1cycle policy (Smith, arXiv 1803.09820).

    The rate rises to max_learning_rate once, falls once, and is constant afterwards. With peak =
    pct_start * total_steps, first = max_learning_rate / div_factor, last = first /
    final_div_factor:

        step <= peak:  first + (max_learning_rate - first) * r(step / peak)
        after it:      last + (max_learning_rate - last)
                         * (1 + cos(pi * (step - peak) / (total_steps - peak))) / 2

    r(x) is (1 - cos(pi * x)) / 2, or x for a linear rise. From total_steps on the rate is last.
    """

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        pct_start: float = 0.3,
        rise: str = "cosine",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        super().__init__()
        self.max_learning_rate = max_learning_rate
        self.total_steps = total_steps
        self.pct_start = pct_start
        self.rise = rise
        self.div_factor = div_factor
        self.final_div_factor = final_div_factor

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        step = tf.cast(step, tf.float32)
        last_step = float(self.total_steps)
        step = tf.clip_by_value(step, 0.0, last_step)

        highest = self.max_learning_rate
        peak = self.pct_start * self.total_steps
        first = highest / self.div_factor
        last = first / self.final_div_factor

        rise_fraction = step / peak if peak > 0 else tf.ones_like(step)
        if self.rise == "cosine":
            angle = math.pi * rise_fraction
            cosine = tf.cos(angle)
            rise_fraction = (1.0 - cosine) / 2.0
        rise = highest - first
        rising = first + rise * rise_fraction

        # With pct_start=1 the rate does not fall, and the number of steps is 0.
        fall_steps = max(self.total_steps - peak, 1e-9)
        fall_fraction = (step - peak) / fall_steps
        angle = math.pi * fall_fraction
        cosine = tf.cos(angle)
        height = (highest - last) * (1.0 + cosine)
        falling = last + height / 2.0
        return tf.where(step <= peak, rising, falling)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        names = (
            "max_learning_rate",
            "total_steps",
            "pct_start",
            "rise",
            "div_factor",
            "final_div_factor",
        )
        return {name: getattr(self, name) for name in names}


def _power(step: tf.Tensor, power: float) -> tf.Tensor:
    # Step 0 has no negative power.
    base = tf.maximum(step, 1.0)
    return tf.pow(base, power)


class _Warmup(Schedule):
    """A base of warm-ups: `warmup_steps` steps (at least 1), then `after`.

    `after` is a schedule or a constant.
    """

    def __init__(self, after: Schedule | float, warmup_steps: int) -> None:
        super().__init__()
        self.after = after
        self.warmup_steps = warmup_steps
        # In a graph the rate would be a tensor without a value.
        with tf.init_scope():
            target_rate = _value(after, warmup_steps)
            self.target_rate = float(target_rate)

    def _then_after(self, rising: tf.Tensor, step: IntLike) -> tf.Tensor:
        """Returns `rising` below warmup_steps, else the value of `after` at `step`."""
        step = tf.convert_to_tensor(step)
        rate = _value(self.after, step)
        is_rising = step < self.warmup_steps
        return tf.where(is_rising, rising, rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        after: Any = self.after
        if isinstance(after, Schedule):
            after = keras.optimizers.schedules.serialize(after)
        return {
            "after": after,
            "warmup_steps": self.warmup_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Warmup:
        """Returns the warm-up that `get_config` describes."""
        after = config.pop("after")
        if not isinstance(after, float):
            after = keras.optimizers.schedules.deserialize(after)
        return cls(after, **config)


@keras.saving.register_keras_serializable("trainer_kit")
class LinearWarmup(_Warmup):
    """Rises in a straight line from warmup_learning_rate to `after` at step warmup_steps."""

    def __init__(
        self, after: Schedule | float, warmup_steps: int, warmup_learning_rate: float = 0.0
    ) -> None:
        super().__init__(after, warmup_steps)
        self.warmup_learning_rate = warmup_learning_rate

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        part = tf.cast(step, tf.float32) / self.warmup_steps
        height = self.target_rate - self.warmup_learning_rate
        rise = part * height
        rising = self.warmup_learning_rate + rise
        return self._then_after(rising, step)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config = super().get_config()
        return {**config, "warmup_learning_rate": self.warmup_learning_rate}


@keras.saving.register_keras_serializable("trainer_kit")
class PolynomialWarmup(_Warmup):
    """(max(step, 1) / warmup_steps) ** power times the value of `after` at step warmup_steps."""

    def __init__(self, after: Schedule | float, warmup_steps: int, power: float = 1.0) -> None:
        super().__init__(after, warmup_steps)
        self.power = power

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the learning rate at `step`."""
        # Step 0 has the rate of step 1.
        counted_step = tf.cast(step, tf.float32)
        counted_step = tf.maximum(counted_step, 1.0)
        part = counted_step / self.warmup_steps
        power = tf.pow(part, self.power)
        rising = self.target_rate * power
        return self._then_after(rising, step)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        config = super().get_config()
        return {**config, "power": self.power}


def _value(rate: Schedule | float, step: IntLike) -> tf.Tensor:
    if isinstance(rate, Schedule):
        rate = rate(step)
    return tf.cast(rate, tf.float32)
