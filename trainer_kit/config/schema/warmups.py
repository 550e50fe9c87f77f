"""Configs of warm-ups of the learning rate. Names and defaults are those of TF Model Garden 2.20."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainer_kit.config.schema.base import Config, OneOfConfig, configclass
from trainer_kit.config.schema.durations import PartOfRun
from trainer_kit.config.schema.number_types import Rate


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
    warmup_steps: PartOfRun | None = None


@configclass
class PolynomialWarmupConfig(Config):
    """(step / warmup_steps) ** power times the schedule's value at the end of the warm-up.

    Attributes:
      name: The name of the warm-up; it changes nothing in training.
      power: The exponent of the share of the warm-up that is done; 1 is a straight line.
      warmup_steps: The number of steps of the warm-up; it has to be set.
    """

    name: str = "polynomial"
    power: Rate = 1.0
    warmup_steps: PartOfRun | None = None


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
