"""Learning rates from configs: schedules, warm-ups, and the current rate of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.rate_schedules import (
    FunctionSchedule,
    LinearWarmup,
    OneCycle,
    PolynomialWarmup,
    PowerAndLinearDecay,
    PowerDecay,
    PowerDecayWithOffset,
    Rate,
    StepCosineDecay,
    WithOffset,
)
from trainer_kit.runtime.keras_internals import get_learning_rate_or_schedule, replace_learning_rate
from trainer_kit.typing import IntLike, Optimizer, Optimizers, Variable

_SCHEDULES: dict[str, Callable[[Any], Schedule]] = {
    "stepwise": lambda section: PiecewiseConstantDecay(
        list(section.boundaries), list(section.values), name=section.name
    ),
    "exponential": lambda section: ExponentialDecay(
        section.initial_learning_rate,
        section.decay_steps,
        section.decay_rate,
        staircase=bool(section.staircase),
        name=section.name,
    ),
    "polynomial": lambda section: PolynomialDecay(
        section.initial_learning_rate,
        section.decay_steps,
        section.end_learning_rate,
        power=section.power,
        cycle=section.cycle,
        name=section.name,
    ),
    "cosine": lambda section: CosineDecay(
        section.initial_learning_rate, section.decay_steps, alpha=section.alpha, name=section.name
    ),
    "power": lambda section: PowerDecay(section.initial_learning_rate, section.power),
    "power_linear": lambda section: PowerAndLinearDecay(
        section.initial_learning_rate,
        section.total_decay_steps,
        section.power,
        section.linear_decay_fraction,
    ),
    "power_with_offset": lambda section: PowerDecayWithOffset(
        section.initial_learning_rate,
        section.power,
        section.offset,
        section.pre_offset_learning_rate,
    ),
    "step_cosine_with_offset": lambda section: StepCosineDecay(section.boundaries, section.values),
    "cosine_restarts": lambda section: CosineDecayRestarts(
        section.initial_learning_rate,
        section.first_decay_steps,
        t_mul=section.t_mul,
        m_mul=section.m_mul,
        alpha=section.alpha,
        name=section.name,
    ),
    "one_cycle": lambda section: OneCycle(
        section.max_learning_rate,
        section.total_steps,
        section.pct_start,
        section.rise,
        section.div_factor,
        section.final_div_factor,
    ),
    "inverse_time": lambda section: InverseTimeDecay(
        section.initial_learning_rate,
        section.decay_steps,
        section.decay_rate,
        staircase=section.staircase,
        name=section.name,
    ),
}

# Before `offset` these schedules have the rate of their step 0.
_CONSTANT_BEFORE_OFFSET = ("cosine_restarts", "one_cycle", "inverse_time")


def create_learning_rate(config: OptimizationConfig) -> Rate:
    """Returns the learning rate that `config` describes; runs eagerly, on the host.

    A constant without a warm-up is a float, which can be changed while training; all else is a
    Keras schedule of the optimizer's own iterations.

    Raises:
      UsageError: when no schedule is chosen, or the chosen one lacks what it needs.
    """
    rate = _create_schedule(config.learning_rate)
    warmup = config.warmup.get()
    if config.warmup.type is None:
        return rate
    if config.warmup.type == "linear":
        return LinearWarmup(rate, warmup.warmup_steps, warmup.warmup_learning_rate)
    return PolynomialWarmup(rate, warmup.warmup_steps, warmup.power)


@tf.autograph.experimental.do_not_convert
def current_learning_rate(optimizer: object, step: IntLike | None = None) -> Any:
    """Returns the learning rate of `optimizer`, a float32 scalar, or a dict of them.

    Runs eagerly or in graph, in any context.

    Args:
      optimizer: An optimizer of Keras, wrapped for loss scaling or not. Any object with a
        `learning_rate`, or with a list of `optimizers`, whose rates have their numbers as names. Or
        a dict.
      step: The step at which a schedule is evaluated. None means the optimizer's iterations, for
        its next step.

    Raises:
      UsageError: when the optimizer has no learning rate.
    """
    if isinstance(optimizer, Mapping):
        rates = {}
        for name, part in optimizer.items():
            rates[name] = current_learning_rate(part, step)
        return rates

    inner = unwrap_optimizer(optimizer)
    rate = get_learning_rate_or_schedule(inner)
    # Without a step the public property has the rate: a schedule's value at the iterations.
    if step is None or not isinstance(rate, Schedule):
        rate = getattr(inner, "learning_rate", None)

    if rate is None:
        parts = getattr(inner, "optimizers", None)
        if parts:
            return {
                str(number): current_learning_rate(part, step) for number, part in enumerate(parts)
            }
        raise UsageError(
            f"{type(inner).__name__} has no learning_rate; give it an attribute of that name"
        )

    if callable(rate):
        rate = rate(inner.iterations if step is None else step)
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)


def unwrap_optimizer(optimizer: object) -> Any:
    """Returns the optimizer that updates the weights, without wrappers for loss scale or period."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class ConfiguredRates:
    """The constant learning rates of the config, so that a resumed run uses changed rates.

    A constant rate is a variable, which a callback can change and a checkpoint contains. The
    restored value is used only if the config has the same rate as when the checkpoint was saved.
    Otherwise the rate of the config is used.

    Args:
      optimizer: An optimizer of either Keras, or a dict of such; built, and not restored yet.
        Others are ignored.
    """

    def __init__(self, optimizer: Optimizers | None) -> None:
        optimizers = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}

        self._variables: dict[str, Variable] = {}
        for name, part in optimizers.items():
            rate = get_learning_rate_or_schedule(unwrap_optimizer(part))
            if isinstance(rate, (keras.Variable, tf.Variable)):
                self._variables[name] = rate

        self._configured_rates: dict[str, float] = {}
        for name, rate in self._variables.items():
            self._configured_rates[name] = float(rate.numpy())

    def state(self) -> dict[str, float]:
        """Returns the rates of the config, for the checkpoint; runs eagerly, on the host."""
        return self._configured_rates

    def restore(self, saved_rates: Mapping[str, float] | None) -> None:
        """Assigns the rates of the config that differ from `saved_rates`.

        Runs eagerly, after a restore.
        """
        for name, rate in self._configured_rates.items():
            if saved_rates is not None and saved_rates.get(name) != rate:
                self._variables[name].assign(rate)


class ScaledRate(Schedule):
    """A learning rate times factors that can be changed during a run.

    A change takes effect in functions that are traced already.

    Args:
      rate: A schedule, or the optimizer's variable of a constant rate, which can still be changed.

    Attributes:
      factors: The factors by name, float32 scalars.
    """

    def __init__(self, rate: Schedule | Variable) -> None:
        self.rate = rate
        self.factors: dict[str, tf.Variable] = {}

    def __call__(self, step: IntLike) -> tf.Tensor:
        """Returns the rate at `step`; runs eagerly or in graph."""
        is_schedule = isinstance(self.rate, Schedule)
        rate = self.rate(step) if is_schedule else tf.convert_to_tensor(self.rate)
        for factor in self.factors.values():
            value = tf.convert_to_tensor(factor)
            rate *= tf.cast(value, rate.dtype)
        return rate

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"rate": self.rate}


def get_base_rate(optimizer: Optimizer) -> Schedule | Variable:
    """Returns the schedule or the variable of an optimizer's rate, without its factors.

    Args:
      optimizer: An optimizer of either Keras.
    """
    rate = get_learning_rate_or_schedule(unwrap_optimizer(optimizer))
    return rate.rate if isinstance(rate, ScaledRate) else rate


def learning_rate_factors(optimizer: Optimizer) -> dict[str, tf.Variable]:
    """Returns the factors of an optimizer's learning rate by name."""
    rate = get_learning_rate_or_schedule(unwrap_optimizer(optimizer))
    return dict(rate.factors) if isinstance(rate, ScaledRate) else {}


def add_learning_rate_factor(optimizer: Optimizer, name: str) -> None:
    """Gives the learning rate of a Keras 3 optimizer a factor, which is 1 at first.

    Runs eagerly, in strategy scope. Takes effect in functions that are traced afterwards. They read
    the factor in each step.

    Raises:
      UsageError: when the optimizer is not a Keras 3 optimizer.
    """
    inner = unwrap_optimizer(optimizer)
    rate = None
    if isinstance(inner, keras.Optimizer):
        rate = get_learning_rate_or_schedule(inner)

    # An earlier call has added another factor.
    scaled = rate if isinstance(rate, ScaledRate) else ScaledRate(rate)
    if rate is None or not replace_learning_rate(inner, scaled):
        raise UsageError(
            f"{type(inner).__name__} has no learning rate that a factor could multiply;"
            " use an optimizer of Keras 3"
        )
    scaled.factors[name] = tf.Variable(1.0, trainable=False, name=name)


def _create_schedule(config: LrConfig) -> Rate:
    section = config.get()
    if section is None:
        raise UsageError(
            "no learning rate was chosen; set trainer.optimizer_config.learning_rate.type to one"
            f" of {', '.join(config.branches())}"
        )

    kind = str(config.type)
    if kind == "constant":
        return float(section.learning_rate)
    # Keras' class needs a boundary.
    if kind == "stepwise" and not section.boundaries:
        return float(section.values[0])
    if kind in LrConfig.registry:
        entry = LrConfig.registry.lookup(kind)
        result = entry.build(section)
        if isinstance(result, Schedule):
            return result
        # A bool is an int, too.
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            return float(result)
        if callable(result):
            return FunctionSchedule(result)
        raise UsageError(
            f"the registered schedule {kind!r} built {result!r:.80}; return a keras"
            " LearningRateSchedule, a function of the step, or a number"
        )

    schedule = _SCHEDULES[kind](section)
    keeps_its_own_offset = isinstance(schedule, PowerDecayWithOffset)
    offset = 0 if keeps_its_own_offset else getattr(section, "offset", 0)
    if offset:
        return WithOffset(schedule, offset, waits=kind in _CONSTANT_BEFORE_OFFSET)
    return schedule
