"""Configs of gradient processors, which change gradients before the optimizer gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    find_broken_patterns,
)
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


@configclass
class ScaleGradientsConfig(Config):
    """Multiplies each gradient by a factor.

    Attributes:
      factor: The factor of the gradients. Optimizers that divide by the size of gradients, such as
        Adam, undo it; for another learning rate of some variables use learning_rate_multipliers.
    """

    factor: float


@configclass
class ClipValueConfig(Config):
    """Bounds the absolute value of each element.

    Attributes:
      bound: The largest absolute value.
    """

    bound: PositiveFloat


@configclass
class ClipNormConfig(Config):
    """Bounds the L2 norm of each gradient.

    Attributes:
      bound: The largest norm.
    """

    bound: PositiveFloat


@configclass
class ClipGlobalNormConfig(Config):
    """Bounds the L2 norm of all gradients together.

    Attributes:
      bound: The largest norm.
    """

    bound: PositiveFloat


@configclass
class GradientNoiseConfig(Config):
    """Adds Gaussian noise that becomes smaller with each update.

    In update t, counted from 0, its standard deviation is stddev / (1 + t) ** decay. The paper
    (arXiv 1511.06807) has the variance eta / (1 + t) ** 0.55, which is stddev = sqrt(eta) and decay
    = 0.275.

    Attributes:
      stddev: The standard deviation in the first update.
      decay: The exponent of the decay; 0: the standard deviation stays the same.
      seed: Makes the numbers differ from those of another processor; they depend on
        runtime.random_seed too.
    """

    stddev: NonNegativeFloat
    decay: NonNegativeFloat = 0.275
    seed: NonNegativeInt = 0


@configclass
class CentralizeConfig(Config):
    """Subtracts the mean from the gradient of each matrix or kernel (arXiv 2004.01461).

    The mean is taken over all axes but the last.
    """


@configclass
class CheckGradientsConfig(Config):
    """Ends the step with an error, before its update, if a gradient is not finite.

    The error names the variable.
    """


@configclass
class SummarizeGradientsConfig(Config):
    """Writes the norm of each gradient to TensorBoard, every trainer.summary_interval steps."""


@configclass
class GradientProcessorConfig(OpenOneOfConfig):
    """Chooses a gradient processor. `trainer_kit.register_gradient_processor` adds one.

    Attributes:
      type: Which of the processors below, or of those that are registered, is used.
      scale: Multiplies gradients.
      clip_value: Bounds each element.
      clip_norm: Bounds the norm of each gradient.
      clip_global_norm: Bounds the norm of all gradients together.
      noise: Adds Gaussian noise.
      centralize: Subtracts the mean of each gradient.
      check: Ends a step with a gradient that is not finite.
      summarize: Writes norms to TensorBoard.
      variables: Regular expressions of the variables whose gradients are processed. Each is
        searched in the path of a variable; empty means all variables.
    """

    registry: ClassVar[Registry[Branch]] = Registry("gradient processor")

    type: str | None = None
    scale: ScaleGradientsConfig | None = None
    clip_value: ClipValueConfig | None = None
    clip_norm: ClipNormConfig | None = None
    clip_global_norm: ClipGlobalNormConfig | None = None
    noise: GradientNoiseConfig | None = None
    centralize: CentralizeConfig | None = None
    check: CheckGradientsConfig | None = None
    summarize: SummarizeGradientsConfig | None = None
    variables: tuple[str, ...] = ()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that a processor is chosen, and the patterns."""
        if self.type is None:
            yield "type", f"is needed; give one of {', '.join(self.branches())}"
        yield from find_broken_patterns("variables", self.variables)

    def get_active_fields(self) -> list[str]:
        return [*super().get_active_fields(), *(["variables"] if self.variables else [])]


def describe_xla_problem(processor: str | None, enable_xla: bool, fuse_steps: int) -> str:
    """Returns why a processor cannot be part of a step that XLA compiles, and what to do.

    The text is empty if it can be. With fuse_steps, a warning in the run says that XLA leaves out
    `check`.

    Args:
      processor: The type of the processor.
      enable_xla: The value of runtime.enable_xla.
      fuse_steps: The value of trainer.fuse_steps.
    """
    cause = ""
    remedy = "trainer.fuse_steps=1"
    if enable_xla:
        cause = "runtime.enable_xla=true"
        remedy = "runtime.enable_xla=false"
    elif fuse_steps > 1:
        cause = f"trainer.fuse_steps={fuse_steps}"

    if processor == "check" and enable_xla:
        return (
            f"check has no effect with {cause}: XLA leaves out assertions;"
            f" remove check, or set {remedy}"
        )
    if processor == "summarize" and cause:
        return (
            f"summarize does not work with {cause}: XLA cannot write summaries;"
            f" remove summarize, or set {remedy}"
        )
    return ""
