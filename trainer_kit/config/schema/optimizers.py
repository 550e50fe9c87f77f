"""Configs of optimizers: a section for each, and the choice between them.

Names and defaults are those of TF Model Garden 2.20. A "oneof" names its chosen branch in `type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.number_types import Above0, Fraction, Rate
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


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
