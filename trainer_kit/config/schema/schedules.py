"""Configs of learning-rate schedules and warm-ups: a section for each, and the choice between them.

Names and defaults are those of TF Model Garden 2.20, and of Keras for what Model Garden does not
have. A "oneof" names its chosen branch in `type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config, OneOfConfig, configclass
from trainer_kit.config.schema.durations import PartOfRun
from trainer_kit.config.schema.number_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    UnitFloat,
)
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


@configclass
class ConstantLrConfig(Config):
    """The same learning rate at every step.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      learning_rate: The learning rate of every step.
    """

    name: str = "Constant"
    learning_rate: NonNegativeFloat = 0.1


@configclass
class _PiecewiseConfig(Config):
    """Learning rates and the steps between them.

    Attributes:
      boundaries: The steps at which the learning rate changes, in increasing order.
      values: The learning rates between or at the boundaries.
      offset: The number of steps by which the schedule starts later.
    """

    boundaries: tuple[NonNegativeInt, ...] | None = None
    values: tuple[NonNegativeFloat, ...] | None = None
    offset: int = 0

    values_more_than_boundaries: ClassVar[int] = 0

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that the boundaries increase, and that there are as many values as they need."""
        if self.boundaries is None:
            return

        if list(self.boundaries) != sorted(set(self.boundaries)):
            yield "boundaries", f"{list(self.boundaries)} does not increase from one to the next"

        expected_count = len(self.boundaries) + self.values_more_than_boundaries
        if self.values is not None and len(self.values) != expected_count:
            yield (
                "values",
                f"{len(self.values)} values are given;"
                f" {len(self.boundaries)} boundaries need {expected_count}",
            )


@configclass
class StepwiseLrConfig(_PiecewiseConfig):
    """`values[i]` until step `boundaries[i]`, with one more value than boundaries.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      values: The learning rates, one more than boundaries: values[i] is used up to step
        boundaries[i].
    """

    values_more_than_boundaries: ClassVar[int] = 1
    name: str = "PiecewiseConstantDecay"


@configclass
class StepCosineLrConfig(_PiecewiseConfig):
    """Half a cosine from `values[i]` at `boundaries[i]` to the next value at the next boundary.

    The first boundary is usually 0. After the last boundary, the rate stays at the last value.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      values: The learning rates at the boundaries, as many as there are boundaries; the rate
        follows half a cosine between two of them.
    """

    name: str = "StepCosineDecayWithOffset"


@configclass
class _DecayConfig(Config):
    """A learning rate that falls.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      initial_learning_rate: The learning rate at which the schedule starts.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = ""
    initial_learning_rate: NonNegativeFloat | None = None
    decay_steps: PartOfRun | None = None
    offset: int = 0


@configclass
class ExponentialLrConfig(_DecayConfig):
    """initial_learning_rate * decay_rate ** ((step - offset) / decay_steps).

    Attributes:
      decay_steps: The number of steps in which the learning rate is multiplied by decay_rate once.
      decay_rate: The factor of the learning rate for each decay_steps steps.
      staircase: Whether the learning rate changes only every decay_steps steps; unset means false,
        which changes it at each step.
    """

    name: str = "ExponentialDecay"
    decay_rate: NonNegativeFloat | None = None
    staircase: bool | None = None


@configclass
class PolynomialLrConfig(_DecayConfig):
    """From initial_learning_rate to end_learning_rate in decay_steps, by a power.

    Attributes:
      decay_steps: The number of steps until the learning rate is end_learning_rate.
      end_learning_rate: The learning rate at the end of the schedule.
      power: The exponent of the polynomial; 1 is a straight line.
      cycle: Whether the schedule starts over with more steps when it has ended.
    """

    name: str = "PolynomialDecay"
    end_learning_rate: NonNegativeFloat = 0.0001
    power: NonNegativeFloat = 1.0
    cycle: bool = False


@configclass
class CosineLrConfig(_DecayConfig):
    """Half a cosine from initial_learning_rate to alpha times it in decay_steps.

    Attributes:
      decay_steps: The number of steps until the learning rate is at its lowest.
      alpha: The lowest learning rate, as a share of initial_learning_rate.
    """

    name: str = "CosineDecay"
    alpha: NonNegativeFloat = 0.0


@configclass
class CosineRestartsLrConfig(Config):
    """Half cosines from a high rate to a low one, each longer than the last (SGDR).

    After each of them, the rate jumps up.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      initial_learning_rate: The learning rate at which the schedule starts.
      first_decay_steps: The number of steps of the first half cosine.
      t_mul: The factor of the number of steps from one half cosine to the next.
      m_mul: The factor of the highest learning rate from one half cosine to the next.
      alpha: The lowest learning rate, as a share of initial_learning_rate.
      offset: The number of steps by which the schedule starts later; before that, the rate is
        initial_learning_rate.
    """

    name: str = "SGDRDecay"
    initial_learning_rate: NonNegativeFloat | None = None
    first_decay_steps: PartOfRun | None = None
    t_mul: Annotated[float, Field(ge=1)] = 2.0
    m_mul: NonNegativeFloat = 1.0
    alpha: NonNegativeFloat = 0.0
    offset: int = 0


@configclass
class OneCycleLrConfig(Config):
    """The 1cycle policy (Smith, arXiv 1803.09820): the rate rises once and falls once.

    It rises to max_learning_rate, and then falls lower than it began. With peak = pct_start *
    total_steps, first = max_learning_rate / div_factor and last = first / final_div_factor, the
    rate goes from first at step 0 to max_learning_rate at step `peak`, by half a cosine or in a
    straight line. From there it goes by half a cosine to last at step total_steps, and stays.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      max_learning_rate: The highest learning rate.
      total_steps: The number of steps of the rise and the fall together.
      pct_start: The share of total_steps in which the rate rises.
      rise: The form of the rise: half a cosine, or a straight line.
      div_factor: The learning rate of step 0 is max_learning_rate divided by this number.
      final_div_factor: The last learning rate is that of step 0 divided by this number.
      offset: The number of steps by which the schedule starts later; before that, the rate is that
        of step 0.
    """

    name: str = "OneCycle"
    max_learning_rate: NonNegativeFloat | None = None
    total_steps: PartOfRun | None = None
    pct_start: UnitFloat = 0.3
    rise: Literal["cosine", "linear"] = "cosine"
    div_factor: PositiveFloat = 25.0
    final_div_factor: PositiveFloat = 10000.0
    offset: int = 0


@configclass
class InverseTimeLrConfig(_DecayConfig):
    """initial_learning_rate / (1 + decay_rate * (step - offset) / decay_steps).

    Attributes:
      decay_steps: The number of steps in which the divisor grows by decay_rate.
      decay_rate: The growth of the divisor in decay_steps steps.
      staircase: Whether the learning rate changes only every decay_steps steps; false changes it at
        each step.
      offset: The number of steps by which the schedule starts later; before that, the rate is
        initial_learning_rate.
    """

    name: str = "InverseTimeDecay"
    decay_rate: NonNegativeFloat | None = None
    staircase: bool = False


@configclass
class DirectPowerLrConfig(Config):
    """initial_learning_rate * step ** power.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      initial_learning_rate: The learning rate at step 1.
      power: The exponent of the step.
    """

    name: str = "DirectPowerDecay"
    initial_learning_rate: NonNegativeFloat | None = None
    power: float = -0.5


@configclass
class PowerAndLinearDecayLrConfig(Config):
    """initial_learning_rate * step ** power, with a straight line down to 0 at the end.

    Over the last part of total_decay_steps, the rate is multiplied by a factor that falls to 0 in a
    straight line.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      initial_learning_rate: The learning rate at step 1.
      total_decay_steps: The step at which the learning rate reaches 0.
      power: The exponent of the step.
      linear_decay_fraction: The last share of total_decay_steps, in which the learning rate also
        falls to 0 in a straight line.
      offset: The number of steps by which the schedule starts later.
    """

    name: str = "PowerAndLinearDecay"
    initial_learning_rate: NonNegativeFloat | None = None
    total_decay_steps: PartOfRun | None = None
    power: float = -0.5
    linear_decay_fraction: UnitFloat = 0.1
    offset: int = 0


@configclass
class PowerDecayWithOffsetLrConfig(Config):
    """pre_offset_learning_rate, then a power of the step.

    It is pre_offset_learning_rate up to step `offset`, and then initial_learning_rate *
    (step - offset) ** power.

    Attributes:
      name: The name of the schedule; it has no effect on training.
      initial_learning_rate: The factor of the power of the step: the learning rate one step after
        `offset`, if that is below pre_offset_learning_rate.
      power: The exponent of the step, which is counted from `offset`.
      offset: The step at which the power begins to apply.
      pre_offset_learning_rate: The learning rate up to step `offset`, and the upper bound after it.
    """

    name: str = "PowerDecayWithOffset"
    initial_learning_rate: NonNegativeFloat | None = None
    power: float = -0.5
    offset: NonNegativeInt = 0
    pre_offset_learning_rate: NonNegativeFloat = 1.0e6


# The numbers that a schedule needs, if it has such a field.
_REQUIRED_FIELDS = (
    "initial_learning_rate",
    "max_learning_rate",
    "decay_rate",
    "boundaries",
    "values",
    "decay_steps",
    "first_decay_steps",
    "total_decay_steps",
    "total_steps",
)

# The schedules that end, with the field of their length. A schedule that is chosen by its name
# alone ends with the run.
_LENGTHS = {
    "polynomial": "decay_steps",
    "cosine": "decay_steps",
    "power_linear": "total_decay_steps",
    "one_cycle": "total_steps",
}


@configclass
class LrConfig(OpenOneOfConfig):
    """Which learning-rate schedule. `trainer_kit.register_schedule` adds one.

    In place of the section, a number sets the base rate of the chosen schedule, or a constant rate
    if none is chosen.

    Attributes:
      type: Which of the learning-rate schedules below is used; an optimizer needs one.
      constant: The settings of a learning rate that never changes.
      stepwise: The settings of a learning rate that changes at given steps.
      exponential: The settings of an exponential decay.
      polynomial: The settings of a polynomial decay.
      cosine: The settings of a decay by half a cosine.
      power: The settings of a decay by a power of the step.
      power_linear: The settings of a decay by a power of the step that ends in a straight line to
        0.
      power_with_offset: The settings of a decay by a power of the step that begins at a given step.
      step_cosine_with_offset: The settings of half cosines between given steps.
      cosine_restarts: The settings of half cosines with restarts.
      one_cycle: The settings of the 1cycle policy, one rise and one fall.
      inverse_time: The settings of a decay by the inverse of the step.
    """

    registry: ClassVar[Registry[Branch]] = Registry("learning-rate schedule")
    main_fields = ("learning_rate", "initial_learning_rate", "max_learning_rate")
    main_branch = "constant"

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
    cosine_restarts: CosineRestartsLrConfig | None = None
    one_cycle: OneCycleLrConfig | None = None
    inverse_time: InverseTimeLrConfig | None = None

    @classmethod
    def expand_short_form(cls, value: object, current: Mapping[str, Any]) -> object:
        """Returns the mapping that a short form stands for.

        A schedule that is chosen by its name ends with the run, unless it has settings already.
        """
        name = str(value)
        if name not in _LENGTHS or current.get(name) is not None:
            return super().expand_short_form(value, current)

        length_field = _LENGTHS[name]
        return {"type": name, name: {length_field: "100 %"}}

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that the chosen schedule has all the numbers that it needs."""
        schedule = self.get()
        for name in _REQUIRED_FIELDS:
            # A field that the schedule does not have is not missing.
            if schedule is not None and getattr(schedule, name, 0) is None:
                yield (
                    f"{self.type}.{name}",
                    f"is needed by the schedule {self.type}; give it a number",
                )


@configclass
class LinearWarmupConfig(Config):
    """From warmup_learning_rate to the schedule's value, in a straight line over warmup_steps.

    Attributes:
      name: The name of the warm-up; it has no effect on training.
      warmup_learning_rate: The learning rate at step 0.
      warmup_steps: The number of steps of the warm-up; it has to be set.
    """

    name: str = "linear"
    warmup_learning_rate: NonNegativeFloat = 0.0
    warmup_steps: PartOfRun | None = None


@configclass
class PolynomialWarmupConfig(Config):
    """(step / warmup_steps) ** power times the schedule's value at the end of the warm-up.

    Attributes:
      name: The name of the warm-up; it has no effect on training.
      power: The exponent of the share of the warm-up that is done; 1 is a straight line.
      warmup_steps: The number of steps of the warm-up; it has to be set.
    """

    name: str = "polynomial"
    power: NonNegativeFloat = 1.0
    warmup_steps: PartOfRun | None = None


@configclass
class WarmupConfig(OneOfConfig):
    """Which warm-up, if any.

    In place of the section, a duration such as "5 %" sets the length of a linear warm-up, or of the
    one that is chosen.

    Attributes:
      type: Which of the warm-ups below is used; unset means none.
      linear: The settings of a warm-up in a straight line.
      polynomial: The settings of a warm-up by a power of the step.
    """

    main_fields = ("warmup_steps",)
    main_branch = "linear"

    type: Literal["linear", "polynomial"] | None = None
    linear: LinearWarmupConfig | None = None
    polynomial: PolynomialWarmupConfig | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that the chosen warm-up has a length."""
        warmup = self.get()
        if warmup is not None and warmup.warmup_steps is None:
            yield f"{self.type}.warmup_steps", "is needed by a warm-up; give it a number of steps"
