"""Configs of optimizers, learning-rate schedules, warm-ups and the moving average of weights.

Names and defaults are those of TF Model Garden 2.20. A "oneof" names its chosen branch in `type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.base import Config, OneOfConfig, configclass
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=0)]
SomeSteps = Annotated[int, Field(ge=1)]


@configclass
class BaseOptimizerConfig(Config):
    """Clipping, which every optimizer can do.

    Attributes:
      clipnorm: The upper bound of the L2 norm of each gradient; unset means no bound.
      clipvalue: The upper bound of the absolute value of each element of a gradient; unset means no bound.
      global_clipnorm: The upper bound of the L2 norm of all gradients together; unset means no bound.
    """

    clipnorm: Above0 | None = None
    clipvalue: Above0 | None = None
    global_clipnorm: Above0 | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that at most one way of clipping is set."""
        given = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, name) is not None]
        if len(given) > 1:
            yield given[1], f"cannot be combined with {given[0]}; choose one way of clipping"


@configclass
class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent, with momentum if asked for. `decay` has to be 0: use a learning-rate schedule.

    Attributes:
      name: The name of the Keras optimizer.
      decay: A decay inside the optimizer is not supported, so this has to be 0; use a learning-rate schedule.
      nesterov: Whether Nesterov momentum is used.
      momentum: The share of the last update that is added to the next one; 0 means no momentum.
    """

    name: str = "SGD"
    decay: Annotated[float, Field(ge=0, le=0)] = 0.0
    nesterov: bool = False
    momentum: Fraction = 0.0


@configclass
class RMSPropConfig(BaseOptimizerConfig):
    """RMSprop.

    Attributes:
      name: The name of the Keras optimizer.
      rho: The decay of the moving average of squared gradients.
      momentum: The share of the last update that is added to the next one; 0 means no momentum.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      centered: Whether gradients are divided by their estimated variance instead of their mean square.
    """

    name: str = "RMSprop"
    rho: Fraction = 0.9
    momentum: Fraction = 0.0
    epsilon: Rate = 1e-7
    centered: bool = False


@configclass
class AdagradConfig(BaseOptimizerConfig):
    """Adagrad.

    Attributes:
      name: The name of the Keras optimizer.
      initial_accumulator_value: The value that the sums of squared gradients start from.
      epsilon: A small number that is added to a denominator, so that it is never 0.
    """

    name: str = "Adagrad"
    initial_accumulator_value: Rate = 0.1
    epsilon: Rate = 1e-7


@configclass
class AdamConfig(BaseOptimizerConfig):
    """Adam.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      amsgrad: Whether the AMSGrad variant is used, which keeps the largest moving average of squared gradients.
    """

    name: str = "Adam"
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: Rate = 1e-7
    amsgrad: bool = False


@configclass
class AdamWeightDecayConfig(BaseOptimizerConfig):
    """Adam with decoupled weight decay.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      amsgrad: Whether the AMSGrad variant is used, which keeps the largest moving average of squared gradients.
      weight_decay_rate: The share of a weight that each step subtracts from it, times the learning rate.
      include_in_weight_decay: Regular expressions of variables that are decayed even if they are excluded.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
      gradient_clip_norm: The upper bound of the L2 norm of all gradients together; 0 means no bound.
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
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      weight_decay_rate: The share of a weight that each step subtracts from it, times the learning rate.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
      exclude_from_layer_adaptation: Keras' LAMB adapts every layer, so this has to be unset.
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
      name: The name of the Keras optimizer.
      factored: Keras' Adafactor always factors the second moment, so this has to be true.
      multiply_by_parameter_scale: Keras' Adafactor always scales updates by the size of the weights, so this has to be
        true.
      beta1: Keras' Adafactor has no first moment, so this has to be unset.
      decay_rate: The exponent of the decay of the second moment.
      step_offset: Keras' Adafactor counts from step 0, so this has to be 0.
      clipping_threshold: The upper bound of the root mean square of an update.
      min_dim_size_to_factor: Keras' Adafactor does not use this size, so it has to be 128.
      epsilon1: A small number that is added to squared gradients.
      epsilon2: The lower bound of the scale of a weight, by which its updates are multiplied.
      weight_decay: The share of a weight that each step subtracts from it; unset means no decay.
      include_in_weight_decay: A regular expression of the variables that are decayed; unset decays all of them.
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
      name: The name of the moving average; it changes nothing in training.
      trainable_weights_only: Whether only trainable weights are averaged; false averages batch statistics too.
      average_decay: The share of the average that each step keeps.
      start_step: The step at which averaging begins.
      dynamic_decay: Whether the average keeps less at first: min(average_decay, (1 + n) / (10 + n)) after n averaged
        steps.
    """

    name: str = "ExponentialMovingAverage"
    trainable_weights_only: bool = True
    average_decay: Fraction = 0.99
    start_step: Steps = 0
    dynamic_decay: bool = True


@configclass
class OptimizerConfig(OpenOneOfConfig):
    """Which optimizer. `trainer_kit.register_optimizer` adds one.

    Attributes:
      type: Which of the optimizers below is used; unset means that the task makes its own.
      sgd: The settings of stochastic gradient descent.
      adam: The settings of Adam.
      adamw: The settings of Adam with decoupled weight decay.
      lamb: The settings of LAMB.
      rmsprop: The settings of RMSprop.
      adagrad: The settings of Adagrad.
      adafactor: The settings of Adafactor.
    """

    registry: ClassVar[Registry[Branch]] = Registry("optimizer")

    type: str | None = None
    sgd: SGDConfig | None = None
    adam: AdamConfig | None = None
    adamw: AdamWeightDecayConfig | None = None
    lamb: LAMBConfig | None = None
    rmsprop: RMSPropConfig | None = None
    adagrad: AdagradConfig | None = None
    adafactor: AdafactorConfig | None = None


@configclass
class ConstantLrConfig(Config):
    """The same learning rate at every step.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      learning_rate: The learning rate of every step.
    """

    name: str = "Constant"
    learning_rate: Rate = 0.1


@configclass
class _PiecewiseConfig(Config):
    """Learning rates and the steps between them.

    Attributes:
      boundaries: The steps at which the learning rate changes, in increasing order.
      values: The learning rates between or at the boundaries.
      offset: The number of steps by which the schedule starts later.
    """

    boundaries: tuple[Steps, ...] | None = None
    values: tuple[Rate, ...] | None = None
    offset: int = 0

    def rules(self) -> Iterator[tuple[str, str]]:
        if self.boundaries is not None and list(self.boundaries) != sorted(set(self.boundaries)):
            yield "boundaries", f"{list(self.boundaries)} does not increase from one to the next"


@configclass
class StepwiseLrConfig(_PiecewiseConfig):
    """`values[i]` until step `boundaries[i]`; one more value than boundaries.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      values: The learning rates, one more than boundaries: values[i] is used up to step boundaries[i].
    """

    name: str = "PiecewiseConstantDecay"

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there is one more value than boundaries."""
        yield from super().rules()
        if self.boundaries is not None and self.values is not None and len(self.values) != len(self.boundaries) + 1:
            needed = len(self.boundaries) + 1
            yield "values", f"{len(self.values)} values are given; {len(self.boundaries)} boundaries need {needed}"


@configclass
class StepCosineLrConfig(_PiecewiseConfig):
    """Cosine from `values[i]` at `boundaries[i]`, of which the first is usually 0, to the next; then the last value.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      values: The learning rates at the boundaries, as many as there are boundaries; the rate follows half a cosine
        between two of them.
    """

    name: str = "StepCosineDecayWithOffset"

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are as many values as boundaries."""
        yield from super().rules()
        if self.boundaries is not None and self.values is not None and len(self.values) != len(self.boundaries):
            yield "values", f"{len(self.values)} values are given; {len(self.boundaries)} boundaries need as many"


@configclass
class ExponentialLrConfig(Config):
    """initial_learning_rate * decay_rate ** ((step - offset) / decay_steps).

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The learning rate at which the schedule starts.
      decay_steps: The number of steps in which the learning rate is multiplied by decay_rate once.
      decay_rate: The factor of the learning rate for each decay_steps steps.
      staircase: Whether the learning rate changes only every decay_steps steps; unset means false, which changes it at
        each step.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = "ExponentialDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    decay_rate: Rate | None = None
    staircase: bool | None = None
    offset: int = 0


@configclass
class PolynomialLrConfig(Config):
    """From initial_learning_rate to end_learning_rate in decay_steps, by a power.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The learning rate at which the schedule starts.
      decay_steps: The number of steps until the learning rate is end_learning_rate.
      end_learning_rate: The learning rate at the end of the schedule.
      power: The exponent of the polynomial; 1 is a straight line.
      cycle: Whether the schedule starts over with more steps when it has ended.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = "PolynomialDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    end_learning_rate: Rate = 0.0001
    power: float = 1.0
    cycle: bool = False
    offset: int = 0


@configclass
class CosineLrConfig(Config):
    """Half a cosine from initial_learning_rate to alpha times it in decay_steps.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The learning rate at which the schedule starts.
      decay_steps: The number of steps until the learning rate is at its lowest.
      alpha: The lowest learning rate, as a share of initial_learning_rate.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = "CosineDecay"
    initial_learning_rate: Rate | None = None
    decay_steps: SomeSteps | None = None
    alpha: Rate = 0.0
    offset: int = 0


@configclass
class DirectPowerLrConfig(Config):
    """initial_learning_rate * step ** power.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The learning rate at step 1.
      power: The exponent of the step.
    """

    name: str = "DirectPowerDecay"
    initial_learning_rate: Rate | None = None
    power: float = -0.5


@configclass
class PowerAndLinearDecayLrConfig(Config):
    """initial_learning_rate * step ** power, times a linear way down to 0 over the last part of total_decay_steps.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The learning rate at step 1.
      total_decay_steps: The step at which the learning rate reaches 0.
      power: The exponent of the step.
      linear_decay_fraction: The last share of total_decay_steps, in which the learning rate also falls to 0 in a
        straight line.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = "PowerAndLinearDecay"
    initial_learning_rate: Rate | None = None
    total_decay_steps: SomeSteps | None = None
    power: float = -0.5
    linear_decay_fraction: Fraction = 0.1
    offset: int = 0


@configclass
class PowerDecayWithOffsetLrConfig(Config):
    """pre_offset_learning_rate up to `offset`, then initial_learning_rate * (step - offset) ** power.

    Attributes:
      name: The name of the schedule; it changes nothing in training.
      initial_learning_rate: The factor of the power of the step: the learning rate one step after `offset`, if that is
        below pre_offset_learning_rate.
      power: The exponent of the step, which is counted from `offset`.
      offset: The step at which the power begins to apply.
      pre_offset_learning_rate: The learning rate up to step `offset`, and the upper bound after it.
    """

    name: str = "PowerDecayWithOffset"
    initial_learning_rate: Rate | None = None
    power: float = -0.5
    offset: Steps = 0
    pre_offset_learning_rate: Rate = 1.0e6


@configclass
class LrConfig(OpenOneOfConfig):
    """Which learning-rate schedule. `trainer_kit.register_schedule` adds one.

    Attributes:
      type: Which of the learning-rate schedules below is used; an optimizer needs one.
      constant: The settings of a learning rate that never changes.
      stepwise: The settings of a learning rate that changes at given steps.
      exponential: The settings of an exponential decay.
      polynomial: The settings of a polynomial decay.
      cosine: The settings of a decay by half a cosine.
      power: The settings of a decay by a power of the step.
      power_linear: The settings of a decay by a power of the step that ends in a straight line to 0.
      power_with_offset: The settings of a decay by a power of the step that begins at a given step.
      step_cosine_with_offset: The settings of half cosines between given steps.
    """

    registry: ClassVar[Registry[Branch]] = Registry("learning-rate schedule")

    type: str | None = None
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
        """Checks that the chosen schedule has all the numbers that it needs."""
        chosen = self.get()
        for name in ("initial_learning_rate", "decay_steps", "decay_rate", "total_decay_steps", "boundaries", "values"):
            if chosen is not None and getattr(chosen, name, 0) is None:
                yield f"{self.type}.{name}", f"is needed by the schedule {self.type}; give it a number"


@configclass
class LinearWarmupConfig(Config):
    """From warmup_learning_rate to the schedule's value, in a straight line over warmup_steps.

    Attributes:
      name: The name of the warm-up; it changes nothing in training.
      warmup_learning_rate: The learning rate at step 0.
      warmup_steps: The number of steps of the warm-up; it has to be set.
    """

    name: str = "linear"
    warmup_learning_rate: Rate = 0.0
    warmup_steps: SomeSteps | None = None


@configclass
class PolynomialWarmupConfig(Config):
    """(step / warmup_steps) ** power times the schedule's value at the end of the warm-up.

    Attributes:
      name: The name of the warm-up; it changes nothing in training.
      power: The exponent of the share of the warm-up that is done; 1 is a straight line.
      warmup_steps: The number of steps of the warm-up; it has to be set.
    """

    name: str = "polynomial"
    power: float = 1.0
    warmup_steps: SomeSteps | None = None


@configclass
class WarmupConfig(OneOfConfig):
    """Which warm-up, if any.

    Attributes:
      type: Which of the warm-ups below is used; unset means none.
      linear: The settings of a warm-up in a straight line.
      polynomial: The settings of a warm-up by a power of the step.
    """

    type: Literal["linear", "polynomial"] | None = None
    linear: LinearWarmupConfig | None = None
    polynomial: PolynomialWarmupConfig | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that the chosen warm-up has a length."""
        chosen = self.get()
        if chosen is not None and chosen.warmup_steps is None:
            yield f"{self.type}.warmup_steps", "is needed by a warm-up; give it a number of steps"


@configclass
class OptimizationConfig(Config):
    """Optimizer, learning rate, warm-up and moving average; off until they get a `type` or, for ema, a section.

    Attributes:
      optimizer: The optimizer and its settings.
      ema: The exponential moving average of the weights; unset means that evaluations use the weights themselves.
      learning_rate: The learning-rate schedule and its settings.
      warmup: The warm-up of the learning rate and its settings.
    """

    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EMAConfig | None = None
    learning_rate: LrConfig = LrConfig()
    warmup: WarmupConfig = WarmupConfig()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that an optimizer has a learning rate."""
        if self.optimizer.type and not self.learning_rate.type:
            yield "learning_rate.type", "is needed when an optimizer is set; the simplest is constant"
