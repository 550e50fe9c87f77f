"""Configs of optimizers: a section for each, and the choice between them.

Names and defaults are those of TF Model Garden 2.20, and of Keras for what Model Garden does not
have. A "oneof" names its chosen branch in `type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import (
    Decay,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveUnitFloat,
    UnitFloat,
)
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


@configclass
class BaseOptimizerConfig(Config):
    """Clipping, which every optimizer can do.

    Attributes:
      clipnorm: The upper bound of the L2 norm of each gradient; unset means no bound.
      clipvalue: The upper bound of the absolute value of each element of a gradient; unset means no
        bound.
      global_clipnorm: The upper bound of the L2 norm of all gradients together; unset means no
        bound.
    """

    clipnorm: PositiveFloat | None = None
    clipvalue: PositiveFloat | None = None
    global_clipnorm: PositiveFloat | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that at most one way of clipping is set."""
        bounds = [
            name
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
            if getattr(self, name) is not None
        ]
        if len(bounds) > 1:
            yield bounds[1], f"cannot be combined with {bounds[0]}; choose one way of clipping"


@configclass
class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent, with momentum if it is set.

    `decay` has to be 0: use a learning-rate schedule.

    Attributes:
      name: The name of the Keras optimizer.
      decay: A decay inside the optimizer is not supported, so this has to be 0; use a learning-rate
        schedule.
      nesterov: Whether Nesterov momentum is used.
      momentum: The share of the last update that is added to the next one; 0 means no momentum.
    """

    name: str = "SGD"
    decay: Annotated[float, Field(ge=0, le=0)] = 0.0
    nesterov: bool = False
    momentum: UnitFloat = 0.0


@configclass
class RMSPropConfig(BaseOptimizerConfig):
    """RMSprop.

    Attributes:
      name: The name of the Keras optimizer.
      rho: The decay of the moving average of squared gradients.
      momentum: The share of the last update that is added to the next one; 0 means no momentum.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      centered: Whether gradients are divided by their estimated variance instead of their mean
        square.
    """

    name: str = "RMSprop"
    rho: Decay = 0.9
    momentum: UnitFloat = 0.0
    epsilon: NonNegativeFloat = 1e-7
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
    initial_accumulator_value: NonNegativeFloat = 0.1
    epsilon: NonNegativeFloat = 1e-7


@configclass
class AdamConfig(BaseOptimizerConfig):
    """Adam.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      amsgrad: Whether the AMSGrad variant is used, which keeps the largest moving average of
        squared gradients.
    """

    name: str = "Adam"
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-7
    amsgrad: bool = False


@configclass
class AdamWeightDecayConfig(AdamConfig):
    """Adam with decoupled weight decay.

    Attributes:
      weight_decay_rate: The share of a weight that each step subtracts from it, times the learning
        rate.
      include_in_weight_decay: Regular expressions of variables that are decayed even if they are
        excluded.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
      gradient_clip_norm: The upper bound of the L2 norm of all gradients together; 0 means no
        bound.
    """

    name: str = "AdamWeightDecay"
    weight_decay_rate: NonNegativeFloat = 0.0
    include_in_weight_decay: tuple[str, ...] | None = None
    exclude_from_weight_decay: tuple[str, ...] | None = None
    gradient_clip_norm: NonNegativeFloat = 1.0


@configclass
class LAMBConfig(BaseOptimizerConfig):
    """LAMB: Adam with a trust ratio for each layer.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      weight_decay_rate: The share of a weight that each step subtracts from it, times the learning
        rate.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
      exclude_from_layer_adaptation: Keras' LAMB adapts every layer, so this has to be unset.
    """

    name: str = "LAMB"
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-6
    weight_decay_rate: NonNegativeFloat = 0.0
    exclude_from_weight_decay: tuple[str, ...] | None = None
    exclude_from_layer_adaptation: None = None


@configclass
class AdafactorConfig(BaseOptimizerConfig):
    """Adafactor, as Keras has it. What Keras' class cannot do has to keep its default.

    Attributes:
      name: The name of the Keras optimizer.
      factored: Keras' Adafactor always factors the second moment, so this has to be true.
      multiply_by_parameter_scale: Keras' Adafactor always scales updates by the size of the
        weights, so this has to be true.
      beta1: Keras' Adafactor has no first moment, so this has to be unset.
      decay_rate: The exponent of the decay of the second moment.
      step_offset: Keras' Adafactor counts from step 0, so this has to be 0.
      clipping_threshold: The upper bound of the root mean square of an update.
      min_dim_size_to_factor: Keras' Adafactor does not use this size, so it has to be 128.
      epsilon1: A small number that is added to squared gradients.
      epsilon2: The lower bound of the scale of a weight, by which its updates are multiplied.
      weight_decay: The share of a weight that each step subtracts from it; unset means no decay.
      include_in_weight_decay: A regular expression of the variables that are decayed; unset decays
        all of them.
    """

    name: str = "Adafactor"
    factored: Literal[True] = True
    multiply_by_parameter_scale: Literal[True] = True
    beta1: None = None
    decay_rate: UnitFloat = 0.8
    step_offset: Annotated[int, Field(ge=0, le=0)] = 0
    clipping_threshold: PositiveFloat = 1.0
    min_dim_size_to_factor: Annotated[int, Field(ge=128, le=128)] = 128
    epsilon1: NonNegativeFloat = 1e-30
    epsilon2: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat | None = None
    include_in_weight_decay: str | None = None


@configclass
class LARSConfig(BaseOptimizerConfig):
    """LARS: gradient descent with momentum and a learning rate for each layer, for large batches.

    Source: arXiv 1708.03888.

    Attributes:
      name: The name of the Keras optimizer.
      momentum: The share of the last velocity that is added to the next one.
      eeta: The trust coefficient: the length of an update as a share of the length of the weight.
      weight_decay_rate: The share of a weight that is added to its gradient.
      nesterov: Whether Nesterov momentum is used.
      classic_momentum: Whether the learning rate is applied when the velocity is updated; false
        applies it afterwards.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
      exclude_from_layer_adaptation: Regular expressions of variables whose updates are not scaled
        by the length of the weight; unset means those of exclude_from_weight_decay.
    """

    name: str = "LARS"
    momentum: UnitFloat = 0.9
    eeta: NonNegativeFloat = 0.001
    weight_decay_rate: NonNegativeFloat = 0.0
    nesterov: bool = False
    classic_momentum: bool = True
    exclude_from_weight_decay: tuple[str, ...] | None = None
    exclude_from_layer_adaptation: tuple[str, ...] | None = None


@configclass
class DecayingOptimizerConfig(BaseOptimizerConfig):
    """Clipping and decoupled weight decay.

    Attributes:
      weight_decay: The share of a weight that each step subtracts from it, times the learning rate;
        unset means none.
      include_in_weight_decay: Regular expressions of variables that are decayed even if they are
        excluded.
      exclude_from_weight_decay: Regular expressions of variables that are not decayed.
    """

    weight_decay: NonNegativeFloat | None = None
    include_in_weight_decay: tuple[str, ...] | None = None
    exclude_from_weight_decay: tuple[str, ...] | None = None


@configclass
class NadamConfig(DecayingOptimizerConfig):
    """Nadam: Adam with Nesterov momentum.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
    """

    name: str = "Nadam"
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-7


@configclass
class AdamaxConfig(DecayingOptimizerConfig):
    """Adamax: Adam whose steps are divided by the largest recent gradient.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The decay of the moving average of gradients.
      beta_2: The decay of the largest gradient.
      epsilon: A small number that is added to a denominator, so that it is never 0.
    """

    name: str = "Adamax"
    beta_1: Decay = 0.9
    beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-7


@configclass
class AdadeltaConfig(DecayingOptimizerConfig):
    """Adadelta. The paper's form has a learning rate of 1.

    Attributes:
      name: The name of the Keras optimizer.
      rho: The decay of the moving averages of squared gradients and squared updates.
      epsilon: A small number that is added to both averages.
    """

    name: str = "Adadelta"
    rho: Decay = 0.95
    epsilon: NonNegativeFloat = 1e-7


@configclass
class FtrlConfig(DecayingOptimizerConfig):
    """FTRL, which makes weights exactly 0 if l1_regularization_strength is set.

    It computes the weights from sums of gradients, so that initial or loaded weights count little
    after the first step. Its learning rate has to be above 0 at each step.

    Attributes:
      name: The name of the Keras optimizer.
      learning_rate_power: The exponent by which the sum of squared gradients lowers the learning
        rate; 0 keeps it.
      initial_accumulator_value: The value that the sums of squared gradients start from.
      l1_regularization_strength: The strength of the L1 penalty.
      l2_regularization_strength: The strength of the L2 penalty, which steadies the weights.
      l2_shrinkage_regularization_strength: The strength of an L2 penalty that is added to the
        gradient.
      beta: The beta of the paper, which lowers the learning rate of the first steps.
    """

    name: str = "Ftrl"
    learning_rate_power: Annotated[float, Field(le=0)] = -0.5
    initial_accumulator_value: NonNegativeFloat = 0.1
    l1_regularization_strength: NonNegativeFloat = 0.0
    l2_regularization_strength: NonNegativeFloat = 0.0
    l2_shrinkage_regularization_strength: NonNegativeFloat = 0.0
    beta: NonNegativeFloat = 0.0


@configclass
class LionConfig(DecayingOptimizerConfig):
    """Lion, whose steps have the size of the learning rate (arXiv 2302.06675).

    Take a learning rate that is 3 to 10 times smaller than for AdamW.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The share of the moving average in a step; the gradient has the rest.
      beta_2: The decay of the moving average of gradients.
    """

    name: str = "Lion"
    beta_1: PositiveUnitFloat = 0.9
    beta_2: UnitFloat = 0.99


@configclass
class MuonConfig(DecayingOptimizerConfig):
    """Keras' Muon for matrices, Adam for all other variables (arXiv 2502.16982).

    It needs Keras 3.13 or newer, and a model of Keras 3.

    Attributes:
      name: The name of the Keras optimizer.
      momentum: The decay of the moving average of gradients in Muon.
      nesterov: Whether Nesterov momentum is used in Muon.
      ns_steps: The number of Newton-Schulz iterations that make the singular values of an update
        equal.
      muon_a: The first coefficient of a Newton-Schulz iteration.
      muon_b: The second coefficient of a Newton-Schulz iteration.
      muon_c: The third coefficient of a Newton-Schulz iteration.
      rms_rate: The root mean square of an update of Muon, so that it is as large as one of Adam;
        unset leaves updates as they are.
      exclude_layers: Regular expressions of variables that Adam updates, such as those of the last
        layer.
      exclude_embeddings: Whether Adam updates variables with "embedding" in their paths.
      weight_decay: The share of a weight that each step of Muon subtracts from it, times the
        learning rate.
      adam_beta_1: The decay of the moving average of gradients in Adam.
      adam_beta_2: The decay of the moving average of squared gradients in Adam.
      epsilon: A small number that is added to a denominator of Adam, so that it is never 0.
      adam_lr_ratio: The learning rate of Adam as a share of the learning rate.
      adam_weight_decay: The share of a weight that each step of Adam subtracts from it, times the
        learning rate.
    """

    name: str = "Muon"
    momentum: UnitFloat = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    muon_a: float = 3.4445
    muon_b: float = -4.7750
    muon_c: float = 2.0315
    rms_rate: PositiveFloat | None = 0.2
    exclude_layers: tuple[str, ...] = ()
    exclude_embeddings: bool = True
    weight_decay: NonNegativeFloat | None = 0.004
    adam_beta_1: Decay = 0.9
    adam_beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-7
    adam_lr_ratio: NonNegativeFloat = 1.0
    adam_weight_decay: NonNegativeFloat | None = 0.004


@configclass
class ScheduleFreeAdamWConfig(DecayingOptimizerConfig):
    """AdamW that averages its weights instead of lowering the learning rate (arXiv 2405.15682).

    The learning rate is constant.

    Attributes:
      name: The name of the Keras optimizer.
      beta_1: The share of the average in the weights of the model.
      beta_2: The decay of the moving average of squared gradients.
      epsilon: A small number that is added to a denominator, so that it is never 0.
      warmup_steps: The number of steps in which the learning rate rises from 0 in a straight line.
    """

    name: str = "ScheduleFreeAdamW"
    beta_1: PositiveUnitFloat = 0.9
    beta_2: Decay = 0.999
    epsilon: NonNegativeFloat = 1e-8
    warmup_steps: NonNegativeInt = 0


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
      lars: The settings of LARS.
      nadam: The settings of Nadam.
      adamax: The settings of Adamax.
      adadelta: The settings of Adadelta.
      ftrl: The settings of FTRL.
      lion: The settings of Lion.
      muon: The settings of Muon.
      schedule_free_adamw: The settings of schedule-free AdamW.
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
    lars: LARSConfig | None = None
    nadam: NadamConfig | None = None
    adamax: AdamaxConfig | None = None
    adadelta: AdadeltaConfig | None = None
    ftrl: FtrlConfig | None = None
    lion: LionConfig | None = None
    muon: MuonConfig | None = None
    schedule_free_adamw: ScheduleFreeAdamWConfig | None = None
