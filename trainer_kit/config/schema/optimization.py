"""Config of optimization as a whole: optimizer, learning rate, warm-up and moving average.

The sections of optimizers and schedules are in optimizer_configs.py and schedules.py. Names and
defaults are those of TF Model Garden 2.20.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.gradient_processor_configs import GradientProcessorConfig
from trainer_kit.config.schema.number_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveUnitFloat,
    UnitFloat,
    find_broken_patterns,
)
from trainer_kit.config.schema.optimizer_configs import BaseOptimizerConfig, OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig, WarmupConfig
from trainer_kit.errors import suggest_names

# The names of the main average and of the trained weights in `ema.evaluate`.
AVERAGE = "average"
WEIGHTS = "weights"


@configclass
class EMAConfig(BaseOptimizerConfig):
    """Exponential moving averages of the weights, used in evaluation and in the best checkpoint.

    Attributes:
      name: The name of the moving average; it changes nothing in training.
      trainable_weights_only: Whether only trainable weights are averaged; false averages batch
        statistics too.
      average_decay: The share of the average that each step keeps.
      start_step: The step at which averaging begins.
      dynamic_decay: Whether the average keeps less at first: min(average_decay, (1 + n) / (10 + n))
        after n averaged steps.
      more_decays: Further averages of the same variables, by name, each with a decay of its own.
        They have the same start_step and dynamic_decay.
      evaluate: What evaluations use: `average`, `weights` (the trained ones) or names of
        more_decays. The first one reports its metrics under their plain names, and load_model loads
        it; the metrics of each other one are nested under its name, such as `weights|accuracy`.
    """

    name: str = "ExponentialMovingAverage"
    trainable_weights_only: bool = True
    average_decay: UnitFloat = 0.99
    start_step: NonNegativeInt = 0
    dynamic_decay: bool = True
    more_decays: dict[str, UnitFloat] = Field(default_factory=dict)
    evaluate: tuple[str, ...] = (AVERAGE,)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that names of averages can be parts of paths, and that `evaluate` is valid."""
        yield from super().rules()

        for name in self.more_decays:
            if not re.fullmatch(r"\w+", name):
                yield (
                    "more_decays",
                    f"{name!r} cannot be a name; use letters, digits and underscores",
                )
            elif name in (AVERAGE, WEIGHTS):
                yield "more_decays", f"{name!r} is a name of trainer_kit; choose another one"

        if not self.evaluate:
            yield "evaluate", f"is empty; name what evaluations use, such as {AVERAGE}"
        names = [AVERAGE, WEIGHTS, *self.more_decays]
        for name, count in Counter(self.evaluate).items():
            if name not in names:
                yield "evaluate", f"there is no average {name!r}; {suggest_names(name, names)}"
            elif count > 1:
                yield "evaluate", f"names {name} {count} times; name it once"


@configclass
class RateMultiplierConfig(Config):
    """A learning rate for some variables, as a multiple of the learning rate.

    Attributes:
      variables: A regular expression that is searched in the path of a variable, such as
        encoder/layer_0/kernel.
      multiplier: The factor of the learning rate of these variables; 0 leaves them and their slots
        as they are.
    """

    variables: str
    multiplier: NonNegativeFloat

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that `variables` is a regular expression."""
        yield from find_broken_patterns("variables", [self.variables])


@configclass
class LayerDecayConfig(Config):
    """Learning rates that become smaller from the output of a model to its input.

    This is layer-wise decay. A variable of layers[i] of n layers has the learning rate times
    decay ** (n - 1 - i).

    Attributes:
      decay: The factor of the learning rate from one layer to the layer before it.
      layers: Regular expressions of the variables of each layer, ordered from input to output. Each
        is searched in the path of a variable, and the first one that is found counts; variables of
        no layer keep their learning rate.
    """

    decay: PositiveUnitFloat
    layers: tuple[str, ...]

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are layers, and that they are regular expressions."""
        if not self.layers:
            yield "layers", "is empty; list the patterns of the layers from input to output"
        yield from find_broken_patterns("layers", self.layers)


@configclass
class OptimizationConfig(Config):
    """Optimizer, learning rate, warm-up and moving average.

    They are off until they get a `type` or, for ema, a section.

    Short forms: `optimizer: adamw` chooses an optimizer, `learning_rate: 1e-3` sets the base rate,
    `schedule: cosine` chooses the schedule of learning_rate, and `warmup: "5 %"` sets a linear
    warm-up.

    Attributes:
      optimizer: The optimizer and its settings.
      ema: The exponential moving average of the weights; unset means that evaluations use the
        weights themselves.
      learning_rate: The learning-rate schedule and its settings.
      warmup: The warm-up of the learning rate and its settings.
      learning_rate_multipliers: Factors of the learning rate for variables by patterns; of several
        patterns that are found in the path of a variable, the first one counts.
      layer_decay: Learning rates that become smaller from the output of the model to its input;
        unset means no such decay. A variable that also has a multiplier has both factors.
      gradient_processors: What is done to the gradients, in this order, before the optimizer's own
        bounds clip them. They are the gradients of an update, summed over replicas and without the
        loss scale.
    """

    aliases = (("schedule", "learning_rate"),)

    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EMAConfig | None = None
    learning_rate: LrConfig = LrConfig()
    warmup: WarmupConfig = WarmupConfig()
    learning_rate_multipliers: tuple[RateMultiplierConfig, ...] = ()
    layer_decay: LayerDecayConfig | None = None
    gradient_processors: tuple[GradientProcessorConfig, ...] = ()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that an optimizer has a learning rate, and that no setting lacks an optimizer."""
        if self.optimizer.type and not self.learning_rate.type:
            yield (
                "learning_rate.type",
                "is needed when an optimizer is set; the simplest is constant",
            )
        for name in ("learning_rate_multipliers", "layer_decay", "gradient_processors"):
            if getattr(self, name) and not self.optimizer.type:
                yield name, "has no effect on the optimizer of the task; set optimizer.type"


@configclass
class NamedOptimizerConfig(OptimizationConfig):
    """One of several optimizers, for some of the variables.

    Attributes:
      variables: Regular expressions of the variables that this optimizer updates. Each is searched
        in the path of a variable; a variable belongs to the first optimizer with a pattern that is
        found. Empty means that the task's method optimizer_variables names them.
      period: The optimizer updates its variables in every n-th step.
      accumulate: Whether an update takes the mean of the gradients of all steps of a period; false
        takes those of the last step.
      loss_scale: The factor of the loss under float16, `dynamic` or a fixed number; unset means
        runtime.loss_scale.
    """

    variables: tuple[str, ...] = ()
    period: PositiveInt = 1
    accumulate: bool = False
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that an optimizer is chosen, the patterns, and that each setting has an effect."""
        yield from super().rules()

        if not self.optimizer.type:
            yield (
                "optimizer.type",
                "is needed: each of trainer.optimizers has an optimizer of its own",
            )
        yield from find_broken_patterns("variables", self.variables)
        if self.accumulate and self.period == 1:
            yield (
                "accumulate",
                "has no effect with period=1; set the number of steps of an update in period",
            )
        if isinstance(self.ema, EMAConfig) and not self.ema.trainable_weights_only:
            problem = "cannot be false: ema averages the variables of its optimizer only"
            yield "ema.trainable_weights_only", f"{problem}; use trainer.optimizer_config.ema"
