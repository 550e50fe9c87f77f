"""From config to learning rate: the schedules and the warm-ups, and what an optimizer's rate is right now."""

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
from trainer_kit.config.schema.schedules import LrConfig, WarmupConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.rate_schedules import (
    FunctionSchedule,
    LinearWarmup,
    OneCycle,
    PolynomialWarmup,
    PowerAndLinearDecay,
    PowerDecay,
    PowerDecayWithOffset,
    StepCosineDecay,
    WithOffset,
)
from trainer_kit.runtime.keras_internals import get_learning_rate_or_schedule, replace_learning_rate

_SCHEDULES: dict[str, Callable[[Any], Schedule]] = {
    "stepwise": lambda c: PiecewiseConstantDecay(list(c.boundaries), list(c.values), name=c.name),
    "exponential": lambda c: ExponentialDecay(
        c.initial_learning_rate,
        c.decay_steps,
        c.decay_rate,
        staircase=bool(c.staircase),
        name=c.name,
    ),
    "polynomial": lambda c: PolynomialDecay(
        c.initial_learning_rate,
        c.decay_steps,
        c.end_learning_rate,
        power=c.power,
        cycle=c.cycle,
        name=c.name,
    ),
    "cosine": lambda c: CosineDecay(
        c.initial_learning_rate, c.decay_steps, alpha=c.alpha, name=c.name
    ),
    "power": lambda c: PowerDecay(c.initial_learning_rate, c.power),
    "power_linear": lambda c: PowerAndLinearDecay(
        c.initial_learning_rate, c.total_decay_steps, c.power, c.linear_decay_fraction
    ),
    "power_with_offset": lambda c: PowerDecayWithOffset(
        c.initial_learning_rate, c.power, c.offset, c.pre_offset_learning_rate
    ),
    "step_cosine_with_offset": lambda c: StepCosineDecay(c.boundaries, c.values),
    "cosine_restarts": lambda c: CosineDecayRestarts(
        c.initial_learning_rate,
        c.first_decay_steps,
        t_mul=c.t_mul,
        m_mul=c.m_mul,
        alpha=c.alpha,
        name=c.name,
    ),
    "one_cycle": lambda c: OneCycle(
        c.max_learning_rate, c.total_steps, c.pct_start, c.rise, c.div_factor, c.final_div_factor
    ),
    "inverse_time": lambda c: InverseTimeDecay(
        c.initial_learning_rate, c.decay_steps, c.decay_rate, staircase=c.staircase, name=c.name
    ),
}
_CONSTANT_BEFORE_OFFSET = (
    "cosine_restarts",
    "one_cycle",
    "inverse_time",
)  # before `offset` they have the rate of their step 0


def create_learning_rate(config: OptimizationConfig) -> float | Schedule:
    """Returns the learning rate that `config` describes; runs eagerly, on the host.

    A constant without a warm-up is a float, which can be changed while training; all else is a
    Keras schedule of the optimizer's own iterations.

    Raises:
      UsageError: when no schedule is chosen, or the chosen one lacks what it needs.
    """
    rate = _schedule(config.learning_rate)
    return rate if config.warmup.type is None else _with_warmup(rate, config.warmup)


@tf.autograph.experimental.do_not_convert
def current_learning_rate(optimizer: Any, step: Any = None) -> Any:
    """Returns the learning rate of `optimizer`, a float32 scalar, or a dict of them.

    Runs eagerly or in graph, in any context.

    Args:
      optimizer: An optimizer of Keras, wrapped for loss scaling or not; any object with a
        `learning_rate`, or with a list of `optimizers`, whose rates have their numbers as names; or
        a dict.
      step: The step at which a schedule is evaluated; None means the optimizer's iterations, for
        its next step.

    Raises:
      UsageError: when the optimizer has no learning rate.
    """
    if isinstance(optimizer, Mapping):
        return {name: current_learning_rate(one, step) for name, one in optimizer.items()}
    optimizer = unwrap_optimizer(optimizer)
    schedule = get_learning_rate_or_schedule(optimizer)
    if step is None or not isinstance(schedule, Schedule):
        schedule = getattr(optimizer, "learning_rate", None)
    if schedule is None and (parts := getattr(optimizer, "optimizers", None)):
        return {str(number): current_learning_rate(part, step) for number, part in enumerate(parts)}
    if schedule is None:
        raise UsageError(
            f"{type(optimizer).__name__} has no learning_rate; give it an attribute of that name"
        )
    if callable(schedule):
        schedule = schedule(optimizer.iterations if step is None else step)
    return tf.cast(tf.convert_to_tensor(schedule), tf.float32)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that updates the weights, without those around it for a loss scale or a period."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


class ConfiguredRates:
    """The constant learning rates of the config, so that a run that is resumed with changed rates uses those.

    A constant rate is a variable, which a callback can change and a checkpoint holds. The restored
    value is used only if the config has the same rate as when the checkpoint was saved; otherwise
    the rate of the config is used.

    Args:
      optimizer: An optimizer of either Keras, or a dict of them; built, and not restored yet.
        Others are ignored.
    """

    def __init__(self, optimizer: Any) -> None:
        named = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        inner = {name: unwrap_optimizer(one) for name, one in named.items()}
        rates = {name: get_learning_rate_or_schedule(one) for name, one in inner.items()}
        self._variables = {
            name: rate
            for name, rate in rates.items()
            if isinstance(rate, (keras.Variable, tf.Variable))
        }
        self._configured_rates = {
            name: float(rate.numpy()) for name, rate in self._variables.items()
        }

    def state(self) -> dict[str, float]:
        """Returns the rates of the config, for the checkpoint; runs eagerly, on the host."""
        return self._configured_rates

    def restore(self, saved_rates: Mapping[str, float] | None) -> None:
        """Assigns the rates of the config that differ from `saved_rates`; runs eagerly, after a restore."""
        for name, rate in self._configured_rates.items():
            if saved_rates is not None and saved_rates.get(name) != rate:
                self._variables[name].assign(rate)


class ScaledRate(Schedule):
    """A learning rate times factors that can be changed while a run goes on, in functions that are traced already.

    Args:
      rate: A schedule, or the optimizer's variable of a constant rate, which can still be changed.

    Attributes:
      factors: The factors by name, float32 scalars.
    """

    def __init__(self, rate: Any) -> None:
        self.rate, self.factors = rate, dict[str, tf.Variable]()

    def __call__(self, step: Any) -> Any:
        """Returns the rate at `step`; runs eagerly or in graph."""
        rate = (
            self.rate(step) if isinstance(self.rate, Schedule) else tf.convert_to_tensor(self.rate)
        )
        for factor in self.factors.values():
            rate *= tf.cast(tf.convert_to_tensor(factor), rate.dtype)
        return rate

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"rate": self.rate}


def get_base_rate(optimizer: Any) -> Any:
    """Returns the schedule or the variable of a constant rate of an optimizer of either Keras, without its factors."""
    rate = get_learning_rate_or_schedule(unwrap_optimizer(optimizer))
    return rate.rate if isinstance(rate, ScaledRate) else rate


def learning_rate_factors(optimizer: Any) -> dict[str, tf.Variable]:
    """Returns the factors of an optimizer's learning rate by name."""
    rate = get_learning_rate_or_schedule(unwrap_optimizer(optimizer))
    return dict(rate.factors) if isinstance(rate, ScaledRate) else {}


def add_learning_rate_factor(optimizer: Any, name: str) -> None:
    """Gives the learning rate of a Keras 3 optimizer a factor, which is 1 at first; runs eagerly, in strategy scope.

    Takes effect in functions that are traced afterwards. They read the factor in each step.

    Raises:
      UsageError: when the optimizer is not a Keras 3 optimizer.
    """
    optimizer = unwrap_optimizer(optimizer)
    rate = (
        get_learning_rate_or_schedule(optimizer) if isinstance(optimizer, keras.Optimizer) else None
    )
    scaled = rate if isinstance(rate, ScaledRate) else ScaledRate(rate)
    if rate is None or not replace_learning_rate(optimizer, scaled):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind} has no learning rate that a factor could multiply; use an optimizer of Keras 3"
        )
    scaled.factors[name] = tf.Variable(1.0, trainable=False, name=name)


def _schedule(config: LrConfig) -> float | Schedule:
    chosen = config.get()
    if chosen is None:
        raise UsageError(
            "no learning rate was chosen; set trainer.optimizer_config.learning_rate.type to one"
            f" of {', '.join(config.branches())}"
        )
    if config.type == "constant":
        return float(chosen.learning_rate)
    if config.type == "stepwise" and not chosen.boundaries:
        return float(chosen.values[0])  # Keras' class cannot do without a boundary
    if config.type in LrConfig.registry:
        return _convert_registered_schedule(
            str(config.type), LrConfig.registry.lookup(str(config.type)).build(chosen)
        )
    schedule = _SCHEDULES[str(config.type)](chosen)
    keeps_its_own_offset = isinstance(schedule, PowerDecayWithOffset)
    offset = 0 if keeps_its_own_offset else getattr(chosen, "offset", 0)
    return (
        WithOffset(schedule, offset, waits=config.type in _CONSTANT_BEFORE_OFFSET)
        if offset
        else schedule
    )


def _convert_registered_schedule(name: str, result: Any) -> float | Schedule:
    """Returns what a registered schedule built; a function of the step becomes a schedule."""
    if isinstance(result, Schedule):
        return result
    if isinstance(result, (int, float)) and not isinstance(result, bool):
        return float(result)
    if callable(result):
        return FunctionSchedule(result)
    raise UsageError(
        f"the registered schedule {name!r} built {result!r:.80}; return a keras"
        " LearningRateSchedule, a function of the step, or a number"
    )


def _with_warmup(rate: float | Schedule, config: WarmupConfig) -> Schedule:
    chosen = config.get()
    if config.type == "linear":
        return LinearWarmup(rate, chosen.warmup_steps, chosen.warmup_learning_rate)
    return PolynomialWarmup(rate, chosen.warmup_steps, chosen.power)
