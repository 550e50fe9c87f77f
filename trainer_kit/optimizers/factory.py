"""Creates optimizers from configs: classes of Keras 3 and our own, with Model Garden's values."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import (
    AdafactorConfig,
    BaseOptimizerConfig,
    LARSConfig,
    MuonConfig,
    OptimizerConfig,
)
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_processing import GradientProcessing
from trainer_kit.optimizers.gradients import Clipping
from trainer_kit.optimizers.keras_optimizers import (
    Adadelta,
    Adafactor,
    Adamax,
    AdamW,
    Ftrl,
    Lamb,
    Lion,
    Muon,
    Nadam,
)
from trainer_kit.optimizers.lars import Lars
from trainer_kit.optimizers.learning_rate import create_learning_rate
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer
from trainer_kit.optimizers.rate_groups import RateGroups, apply_rate_groups
from trainer_kit.optimizers.rate_schedules import Rate
from trainer_kit.optimizers.schedule_free import ScheduleFreeAdamW
from trainer_kit.optimizers.weight_decay import DecayRule, DecayRuleMixin
from trainer_kit.typing import Optimizers, Variable

_LOG = logging.getLogger(__name__)


def create_optimizer(
    config: OptimizationConfig,
    *,
    mixed_precision_dtype: str | None = None,
    loss_scale: str | float | None = None,
    random_seed: int = 0,
) -> keras.Optimizer:
    """Returns the optimizer that `config` describes; runs eagerly, in the scope of the strategy.

    Its attribute `clipping` says how `gradients.apply_gradients` clips gradients. Keras' own clip
    arguments are not used. Build it with all the model's trainable variables before the first step.

    Args:
      config: Optimizer, learning rate, warm-up, gradient processors, and groups of variables with
        separate rates. Its `ema` is for moving_average.MovingAverage.
      mixed_precision_dtype: For float16 the optimizer is wrapped in a LossScaleOptimizer. None:
        Keras's global policy.
      loss_scale: 'dynamic' (also None) or a number above 0, only for float16.
      random_seed: The seed of the run, for processors that draw random numbers.

    Raises:
      UsageError: when the config names no optimizer or no learning rate, or a value cannot be used.
    """
    if not config.optimizer.type:
        raise UsageError(
            "no optimizer was chosen; set trainer.optimizer_config.optimizer.type to one of "
            f"{', '.join(OptimizerConfig.branches())}"
        )

    groups = RateGroups.from_config(config)
    optimizer = apply_rate_groups(_build(config), groups)
    optimizer.clipping = Clipping.from_config(config)
    if config.gradient_processors:
        optimizer.gradient_processing = GradientProcessing(config.gradient_processors, random_seed)

    mixed_precision_dtype = mixed_precision_dtype or keras.config.dtype_policy().name
    if mixed_precision_dtype in ("float16", "mixed_float16"):
        if loss_scale in (None, "dynamic"):
            return LossScaleOptimizer(optimizer)
        if isinstance(loss_scale, (str, bool)) or not 0 < loss_scale < float("inf"):
            raise UsageError(
                f"loss_scale is {loss_scale!r}; give 'dynamic' or a number above 0, like 1024"
            )
        return LossScaleOptimizer(optimizer, initial_scale=float(loss_scale), dynamic=False)

    if loss_scale is not None:
        _LOG.warning(
            "loss_scale=%s is not used: it is for float16, not %s",
            loss_scale,
            mixed_precision_dtype,
        )
    return optimizer


def _build(config: OptimizationConfig) -> keras.Optimizer:
    kind = str(config.optimizer.type)
    rate = create_learning_rate(config)
    section = config.optimizer.get()

    if kind in _CLASSES:
        optimizer_class, names = _CLASSES[kind]
        arguments = _arguments(optimizer_class, names, section)
        return optimizer_class(rate, **arguments)
    if kind in _BUILDERS:
        return _BUILDERS[kind](section, rate)

    entry = OptimizerConfig.registry.lookup(kind)
    optimizer = entry.build(section, rate)
    if not isinstance(optimizer, keras.Optimizer):
        other_class = type(optimizer)
        raise UsageError(
            f"the registered optimizer {kind!r} built a"
            f" {other_class.__module__}.{other_class.__name__}; return an optimizer of"
            " Keras 3 (keras.Optimizer)"
        )
    return optimizer


def build_optimizers(optimizer: Optimizers | None, variables: Sequence[Variable]) -> None:
    """Creates the slot variables of a Keras 3 optimizer, or of each in a dict, if it has none yet.

    Runs eagerly, in strategy scope.

    Args:
      optimizer: An optimizer of any library, a dict of optimizers, or None. Only those of Keras 3
        need this call.
      variables: The variables that are trained.
    """
    optimizers = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
    for part in optimizers:
        if isinstance(part, keras.Optimizer) and not part.built:
            part.build(variables)


def _adafactor(config: AdafactorConfig, rate: Rate) -> keras.Optimizer:
    rule = DecayRule()
    if config.include_in_weight_decay:
        rule = DecayRule(include=(config.include_in_weight_decay,), rest=False)
    return Adafactor(
        rate,
        beta_2_decay=-config.decay_rate,
        epsilon_1=config.epsilon1,
        epsilon_2=config.epsilon2,
        clip_threshold=config.clipping_threshold,
        weight_decay=config.weight_decay,
        decay_rule=rule,
        name=config.name,
    )


def _lars(config: LARSConfig, rate: Rate) -> keras.Optimizer:
    unadapted = config.exclude_from_layer_adaptation or config.exclude_from_weight_decay or ()
    names = "momentum eeta nesterov classic_momentum weight_decay=weight_decay_rate name"
    arguments = _arguments(Lars, names, config)
    return Lars(rate, adaptation_rule=DecayRule(exclude=unadapted), **arguments)


def _muon(config: MuonConfig, rate: Rate) -> keras.Optimizer:
    # The Muon of an older Keras has no rms_rate.
    if "rms_rate" not in inspect.signature(keras.optimizers.Muon).parameters:
        raise UsageError(
            f"optimizer.type=muon needs Keras 3.13 or newer, and Keras {keras.version()} is"
            " installed; update Keras, or choose another optimizer, such as adamw"
        )
    names = (
        "momentum nesterov ns_steps muon_a muon_b muon_c rms_rate exclude_layers exclude_embeddings"
        " weight_decay adam_beta_1 adam_beta_2 epsilon adam_lr_ratio adam_weight_decay name"
    )
    return Muon(rate, **_arguments(Muon, names, config))


def _arguments(
    optimizer: type[keras.Optimizer], names: str, config: BaseOptimizerConfig
) -> dict[str, Any]:
    """Returns the arguments of an optimizer.

    "a=b" in `names` is the argument a with the value of the field b.
    """
    arguments: dict[str, Any] = {}
    for name in names.split():
        argument, _, field = name.partition("=")
        arguments[argument] = getattr(config, field or argument)

    if issubclass(optimizer, DecayRuleMixin):
        include = getattr(config, "include_in_weight_decay", None) or ()
        exclude = getattr(config, "exclude_from_weight_decay", None) or ()
        arguments["decay_rule"] = DecayRule(include, exclude)
    return arguments


_ADAM = "beta_1 beta_2 epsilon name"
_FTRL = (
    "learning_rate_power initial_accumulator_value l1_regularization_strength"
    " l2_regularization_strength"
)

# The class of each optimizer, and its arguments. An argument has the name of a field of the config,
# or is written "argument=field".
_CLASSES: dict[str, tuple[type[keras.Optimizer], str]] = {
    "sgd": (keras.optimizers.SGD, "momentum nesterov name"),
    "adam": (keras.optimizers.Adam, f"{_ADAM} amsgrad"),
    "adamw": (AdamW, f"{_ADAM} amsgrad weight_decay=weight_decay_rate"),
    "lamb": (Lamb, f"{_ADAM} weight_decay=weight_decay_rate"),
    "rmsprop": (keras.optimizers.RMSprop, "rho momentum epsilon centered name"),
    "adagrad": (keras.optimizers.Adagrad, "initial_accumulator_value epsilon name"),
    "nadam": (Nadam, f"{_ADAM} weight_decay"),
    "adamax": (Adamax, f"{_ADAM} weight_decay"),
    "adadelta": (Adadelta, "rho epsilon weight_decay name"),
    "ftrl": (Ftrl, f"{_FTRL} l2_shrinkage_regularization_strength beta weight_decay name"),
    "lion": (Lion, "beta_1 beta_2 weight_decay name"),
    "schedule_free_adamw": (ScheduleFreeAdamW, f"{_ADAM} warmup_steps weight_decay"),
}
_BUILDERS: dict[str, Callable[[Any, Rate], keras.Optimizer]] = {
    "adafactor": _adafactor,
    "lars": _lars,
    "muon": _muon,
}
