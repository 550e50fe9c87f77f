"""From config to optimizer: Keras 3's own classes with Model Garden's values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizers import OptimizerConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradients import Clipping
from trainer_kit.optimizers.learning_rate import create_learning_rate
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer
from trainer_kit.optimizers.weight_decay import Adafactor, AdamW, DecayRule, Lamb

_log = logging.getLogger(__name__)

Rate: TypeAlias = float | Schedule


def create_optimizer(
    config: OptimizationConfig,
    *,
    mixed_precision_dtype: str | None = None,
    loss_scale: str | float | None = None,
) -> keras.Optimizer:
    """Returns the optimizer that `config` describes; eager, in the scope of the strategy.

    Its attribute `clipping` tells `gradients.apply_gradients` how to clip gradients; Keras' own clip arguments are not
    used. Build it with all the model's trainable variables before the first step.

    Args:
      config: optimizer, learning rate and warm-up; its `ema` is for moving_average.MovingAverage.
      mixed_precision_dtype: for float16 the optimizer is wrapped in a loss_scale.LossScaleOptimizer.
      loss_scale: 'dynamic' (also None) or a number above 0; only for float16.

    Raises:
      UsageError: when the config names no optimizer or no learning rate, or a value cannot be used.
    """
    if not config.optimizer.type:
        raise UsageError(
            f"no optimizer was chosen; set optimizer.type to one of {', '.join(OptimizerConfig.branches())}"
        )
    optimizer = _build(config)
    optimizer.clipping = Clipping.from_config(config)
    if mixed_precision_dtype in ("float16", "mixed_float16"):
        return _with_loss_scale(optimizer, loss_scale)
    if loss_scale is not None:
        _log.warning("loss_scale=%s is not used: it is for float16, not %s", loss_scale, mixed_precision_dtype)
    return optimizer


def _build(config: OptimizationConfig) -> keras.Optimizer:
    kind, rate = str(config.optimizer.type), create_learning_rate(config)
    if kind not in OptimizerConfig.registry:
        return _BUILDERS[kind](config.optimizer.get(), rate)
    optimizer = OptimizerConfig.registry.lookup(kind).build(config.optimizer.get(), rate)
    if not isinstance(optimizer, keras.Optimizer):
        raise UsageError(
            f"the registered optimizer {kind!r} built a {type(optimizer).__module__}.{type(optimizer).__name__}; "
            "return an optimizer of Keras 3 (keras.Optimizer)"
        )
    return optimizer


def build_optimizers(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the slot variables of a Keras 3 optimizer, or of each in a dict, if it has none yet; eager, in scope.

    Args:
      optimizer: An optimizer of any library, a dict of optimizers, or None; only those of Keras 3 need this call.
      variables: The variables that are trained.
    """
    for one in optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]:
        if isinstance(one, keras.Optimizer) and not one.built:
            one.build(variables)


def _with_loss_scale(optimizer: keras.Optimizer, loss_scale: str | float | None) -> LossScaleOptimizer:
    if loss_scale in (None, "dynamic"):
        return LossScaleOptimizer(optimizer)
    if isinstance(loss_scale, (str, bool)) or not 0 < loss_scale < float("inf"):
        raise UsageError(f"loss_scale is {loss_scale!r}; give 'dynamic' or a number above 0, like 1024")
    return LossScaleOptimizer(optimizer, initial_scale=float(loss_scale), dynamic=False)


def _sgd(config: Any, rate: Rate) -> keras.Optimizer:
    return keras.optimizers.SGD(rate, momentum=config.momentum, nesterov=config.nesterov, name=config.name)


def _adam(config: Any, rate: Rate) -> keras.Optimizer:
    return keras.optimizers.Adam(rate, **_fields(config, "beta_1", "beta_2", "epsilon", "amsgrad", "name"))


def _adamw(config: Any, rate: Rate) -> keras.Optimizer:
    rule = DecayRule(config.include_in_weight_decay or (), config.exclude_from_weight_decay or ())
    same = _fields(config, "beta_1", "beta_2", "epsilon", "amsgrad", "name")
    return AdamW(rate, weight_decay=config.weight_decay_rate, decay_rule=rule, **same)


def _lamb(config: Any, rate: Rate) -> keras.Optimizer:
    rule = DecayRule(exclude=config.exclude_from_weight_decay or ())
    same = _fields(config, "beta_1", "beta_2", "epsilon", "name")
    return Lamb(rate, weight_decay=config.weight_decay_rate, decay_rule=rule, **same)


def _rmsprop(config: Any, rate: Rate) -> keras.Optimizer:
    return keras.optimizers.RMSprop(rate, **_fields(config, "rho", "momentum", "epsilon", "centered", "name"))


def _adagrad(config: Any, rate: Rate) -> keras.Optimizer:
    return keras.optimizers.Adagrad(rate, **_fields(config, "initial_accumulator_value", "epsilon", "name"))


def _adafactor(config: Any, rate: Rate) -> keras.Optimizer:
    only = config.include_in_weight_decay
    return Adafactor(
        rate,
        beta_2_decay=-config.decay_rate,
        epsilon_1=config.epsilon1,
        epsilon_2=config.epsilon2,
        clip_threshold=config.clipping_threshold,
        weight_decay=config.weight_decay,
        decay_rule=DecayRule(include=(only,), rest=False) if only else DecayRule(),
        name=config.name,
    )


def _fields(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


_BUILDERS: dict[str, Callable[[Any, Rate], keras.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "lamb": _lamb,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "adafactor": _adafactor,
}
