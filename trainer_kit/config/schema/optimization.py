"""Configs of optimizers, learning-rate schedules, warm-ups and the moving average of weights.

Names and defaults are those of TF Model Garden 2.20. A "oneof" names its chosen branch in `type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer_kit.config.schema.base import Config, OneOfConfig, configclass

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=0)]
SomeSteps = Annotated[int, Field(ge=1)]


@configclass
class BaseOptimizerConfig(Config):
    """Clipping, which every optimizer can do.

    Attributes:
      clipnorm: bound of the L2 norm of each gradient.
      clipvalue: bound of the absolute value of each gradient's elements.
      global_clipnorm: bound of the L2 norm of all gradients together.
    """

    clipnorm: Above0 | None = None
    clipvalue: Above0 | None = None
    global_clipnorm: Above0 | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """At most one way of clipping."""
        given = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, name) is not None]
        if len(given) > 1:
            yield given[1], f"cannot be combined with {given[0]}; choose one way of clipping"


@configclass
class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent, with momentum if asked for. `decay` has to be 0: use a learning-rate schedule."""

    name: str = "SGD"
    decay: Annotated[float, Field(ge=0, le=0)] = 0.0
    nesterov: bool = False
    momentum: Fraction = 0.0


@configclass
class RMSPropConfig(BaseOptimizerConfig):
    """RMSprop."""

    name: str = "RMSprop"
    rho: Fraction = 0.9
    momentum: Fraction = 0.0
    epsilon: Rate = 1e-7
    centered: bool = False


@configclass
class AdagradConfig(BaseOptimizerConfig):
    """Adagrad."""

    name: str = "Adagrad"
    initial_accumulator_value: Rate = 0.1
    epsilon: Rate = 1e-7


@configclass
class AdamConfig(BaseOptimizerConfig):
    """Adam."""

    name: str = "Adam"
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: Rate = 1e-7
    amsgrad: bool = False


@configclass
class AdamWeightDecayConfig(BaseOptimizerConfig):
    """Adam with decoupled weight decay.

    Attributes:
      weight_decay_rate: fraction of a weight that each step takes away, times the learning rate.
      include_in_weight_decay: regular expressions; variables that match are decayed even if excluded.
      exclude_from_weight_decay: regular expressions; variables that match are not decayed.
      gradient_clip_norm: bound of the L2 norm of all gradients together; 0: none.
    """

    name: str = "AdamWeightDecay"
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: Rate = 1e-7
    amsgrad: bool = False
    weight_decay_rate: Rate = 0.0
    include_in_weight_decay: tuple[str, ...] | None = None
    exclude_from_weight_decay: tuple[str, ...] | None = None
    gradient_clip_norm: Rate = 1.0


@configclass
class LAMBConfig(BaseOptimizerConfig):
    """LAMB: Adam with a trust ratio for each layer.

    Attributes:
      weight_decay_rate: as in AdamWeightDecayConfig.
      exclude_from_weight_decay: regular expressions of variables that are not decayed.
      exclude_from_layer_adaptation: has to be None; Keras' LAMB adapts every layer.
    """

    name: str = "LAMB"
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: Rate = 1e-6
    weight_decay_rate: Rate = 0.0
    exclude_from_weight_decay: tuple[str, ...] | None = None
    exclude_from_layer_adaptation: None = None


@configclass
class AdafactorConfig(BaseOptimizerConfig):
    """Adafactor, as Keras has it. What Keras' class cannot do has to keep its default.

    Attributes:
      decay_rate: exponent of the second moment's decay.
      clipping_threshold: bound of the root mean square of an update.
      epsilon1, epsilon2: regularisers of squared gradients and of the parameter scale.
      weight_decay: decoupled weight decay.
      include_in_weight_decay: a regular expression; only variables that match are decayed.
    """

    name: str = "Adafactor"
    factored: Literal[True] = True
    multiply_by_parameter_scale: Literal[True] = True
    beta1: None = None
    decay_rate: Fraction = 0.8
    step_offset: Annotated[int, Field(ge=0, le=0)] = 0
    clipping_threshold: Above0 = 1.0
    min_dim_size_to_factor: Annotated[int, Field(ge=128, le=128)] = 128
    epsilon1: Rate = 1e-30
    epsilon2: Rate = 1e-3
    weight_decay: Rate | None = None
    include_in_weight_decay: str | None = None


@configclass
class EMAConfig(BaseOptimizerConfig):
    """Exponential moving average of the weights, used in evaluation and in the best checkpoint.

    Attributes:
      trainable_weights_only: average only trainable weights; else batch statistics too.
      average_decay: how much of the average each step keeps.
      start_step: the step at which averaging begins.
      dynamic_decay: keep less at first: min(average_decay, (1 + n) / (10 + n)) after n averaged steps.
    """

    name: str = "ExponentialMovingAverage"
    trainable_weights_only: bool = True
    average_decay: Fraction = 0.99
    start_step: Steps = 0
    dynamic_decay: bool = True


@configclass
class OptimizerConfig(OneOfConfig):
    """Which optimizer."""

    type: Literal["sgd", "adam", "adamw", "lamb", "rmsprop", "adagrad", "adafactor"] | None = None
    sgd: SGDConfig | None = None
    adam: AdamConfig | None = None
    adamw: AdamWeightDecayConfig | None = None
    lamb: LAMBConfig | None = None
    rmsprop: RMSPropConfig | None = None
    adagrad: AdagradConfig | None = None
    adafactor: AdafactorConfig | None = None


@configclass
class ConstantLrConfig(Config):
    """The same learning rate at every step."""

    name: str = "Constant"
    learning_rate: Rate = 0.1


@configclass
class _PiecewiseConfig(Config):
    boundaries: tuple[Steps, ...] | None = None
    values: tuple[Rate, ...] | None = None
    offset: int = 0

    def rules(self) -> Iterator[tuple[str, str]]:
        if self.boundaries is not None and list(self.boundaries) != sorted(set(self.boundaries)):
            yield "boundaries", f"{list(self.boundaries)} does not increase from one to the next"


@configclass
class StepwiseLrConfig(_PiecewiseConfig):
    """`values[i]` until step `boundaries[i]`; one more value than boundaries."""

    name: str = "PiecewiseConstantDecay"

    def rules(self) -> Iterator[tuple[str, str]]:
        """One more value than boundaries."""
        yield from super().rules()
        if self.boundaries is not None and self.values is not None and len(self.values) != len(self.boundaries) + 1:
            yield "values", f"{len(self.values)} given; {len(self.boundaries)} boundaries need one more than that"


@configclass
class StepCosineLrConfig(_PiecewiseConfig):
    """Cosine from `values[i]` at `boundaries[i]`, of which the first is usually 0, to the next; then the last value."""

    name: str = "StepCosineDecayWithOffset"

    def rules(self) -> Iterator[tuple[str, str]]:
        """As many values as boundaries."""
        yield from super().rules()
        if self.boundaries is not None and self.values is not None and len(self.values) != len(self.boundaries):
            yield "values", f"{len(self.values)} given; {len(self.boundaries)} boundaries need as many"


@configclass
class ExponentialLrConfig(Config):
    """initial_learning_rate * decay_rate ** ((step - offset) / decay_steps)."""

    name: str = "ExponentialDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    decay_rate: Rate | None = None
    staircase: bool | None = None
    offset: int = 0


@configclass
class PolynomialLrConfig(Config):
    """From initial_learning_rate to end_learning_rate in decay_steps, by a power."""

    name: str = "PolynomialDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    end_learning_rate: Rate = 0.0001
    power: float = 1.0
    cycle: bool = False
    offset: int = 0


@configclass
class CosineLrConfig(Config):
    """Half a cosine from initial_learning_rate to alpha times it in decay_steps."""

    name: str = "CosineDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    alpha: Rate = 0.0
    offset: int = 0


@configclass
class DirectPowerLrConfig(Config):
    """initial_learning_rate * step ** power."""

    name: str = "DirectPowerDecay"
    initial_learning_rate: Rate | None = None
    power: float = -0.5


@configclass
class PowerAndLinearDecayLrConfig(Config):
    """initial_learning_rate * step ** power, times a linear way down to 0 over the last part of total_decay_steps."""

    name: str = "PowerAndLinearDecay"
    initial_learning_rate: Rate | None = None
    total_decay_steps: SomeSteps | None = None
    power: float = -0.5
    linear_decay_fraction: Fraction = 0.1
    offset: int = 0


@configclass
class PowerDecayWithOffsetLrConfig(Config):
    """pre_offset_learning_rate up to `offset`, then initial_learning_rate * (step - offset) ** power."""

    name: str = "PowerDecayWithOffset"
    initial_learning_rate: Rate | None = None
    power: float = -0.5
    offset: Steps = 0
    pre_offset_learning_rate: Rate = 1.0e6


@configclass
class LrConfig(OneOfConfig):
    """Which learning-rate schedule."""

    type: (
        Literal[
            "constant", "stepwise", "exponential", "polynomial", "cosine",
            "power", "power_linear", "power_with_offset", "step_cosine_with_offset",
        ]
        | None
    ) = None  # fmt: skip
    constant: ConstantLrConfig | None = None
    stepwise: StepwiseLrConfig | None = None
    exponential: ExponentialLrConfig | None = None
    polynomial: PolynomialLrConfig | None = None
    cosine: CosineLrConfig | None = None
    power: DirectPowerLrConfig | None = None
    power_linear: PowerAndLinearDecayLrConfig | None = None
    power_with_offset: PowerDecayWithOffsetLrConfig | None = None
    step_cosine_with_offset: StepCosineLrConfig | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """The chosen schedule has all the numbers that it needs."""
        chosen = self.get()
        for name in ("initial_learning_rate", "decay_steps", "decay_rate", "total_decay_steps", "boundaries", "values"):
            if chosen is not None and getattr(chosen, name, 0) is None:
                yield f"{self.type}.{name}", f"is needed by the schedule {self.type}; give it a number"


@configclass
class LinearWarmupConfig(Config):
    """From warmup_learning_rate to the schedule's value, in a straight line over warmup_steps."""

    name: str = "linear"
    warmup_learning_rate: Rate = 0.0
    warmup_steps: SomeSteps | None = None


@configclass
class PolynomialWarmupConfig(Config):
    """(step / warmup_steps) ** power times the schedule's value at the end of the warm-up."""

    name: str = "polynomial"
    power: float = 1.0
    warmup_steps: SomeSteps | None = None


@configclass
class WarmupConfig(OneOfConfig):
    """Which warm-up, if any."""

    type: Literal["linear", "polynomial"] | None = None
    linear: LinearWarmupConfig | None = None
    polynomial: PolynomialWarmupConfig | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """A warm-up has a length."""
        chosen = self.get()
        if chosen is not None and chosen.warmup_steps is None:
            yield f"{self.type}.warmup_steps", "is needed by a warm-up; give it a number of steps"


@configclass
class OptimizationConfig(Config):
    """Optimizer, learning rate, warm-up and moving average; off until they get a `type` or, for ema, a section."""

    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EMAConfig | None = None
    learning_rate: LrConfig = LrConfig()
    warmup: WarmupConfig = WarmupConfig()

    def rules(self) -> Iterator[tuple[str, str]]:
        """An optimizer needs a learning rate."""
        if self.optimizer.type and not self.learning_rate.type:
            yield "learning_rate.type", "is needed beside an optimizer; the simplest is constant"
