"""The config of a sweep: what the file of `trainer-kit sweep --optuna` contains.

Imports neither TensorFlow nor Optuna.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import NonNegativeInt, PositiveInt


@configclass
class SearchRange(Config):
    """The values that a sweep tries for one hyper-parameter: a list of choices, or a range.

    Attributes:
      choices: The values to choose from. They may be lists and mappings.
      low, high: The smallest and the largest value. If both are whole numbers, all values are.
      log: Whether values are drawn on a logarithmic scale.
      step: The distance of two neighbouring values; unset means 1 for whole numbers and no grid for
        others.
    """

    choices: tuple[Any, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None

    @property
    def labels(self) -> list[str | int | float | bool | None]:
        """The choices as Optuna stores them: numbers and texts, and lists and mappings as JSON."""
        is_plain = (str, int, float, bool, type(None))
        return [
            choice if isinstance(choice, is_plain) else json.dumps(choice)
            for choice in self.choices
        ]

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are choices or a range, and that the range is one."""
        has_range = self.low is not None and self.high is not None
        if bool(self.choices) == has_range:
            yield "choices", "a search range has either choices or low and high; give one of both"
        if self.low is not None and self.high is not None:
            if self.low > self.high:
                yield "low", f"{self.low} is above high, which is {self.high}; exchange them"
            if self.log and (self.low <= 0 or self.step is not None):
                yield "log", "a logarithmic range has low above 0 and no step; change one of them"
            if self.step is not None and self.step <= 0:
                yield "step", f"{self.step} is not above 0; give a step above 0, or none"


@configclass
class SweepConfig(Config):
    """What a sweep tries, and how Optuna chooses.

    Attributes:
      trials: The number of trials; sampler=grid tries all combinations instead.
      metric: The metric that decides; empty means trainer.best_checkpoint_eval_metric.
      direction: Whether higher or lower values are better; unset means
        trainer.best_checkpoint_metric_comp.
      sampler: How values are drawn: `tpe` learns from finished trials, `random` does not, and
        `grid` tries all combinations of choices.
      pruner: What ends a trial early: `median` if its metric is worse than the median of the
        earlier trials at the same step, `hyperband` for most trials after few evaluations.
      seed: The seed of the sampler.
      space: The search range of each hyper-parameter, by its path in the config.
    """

    trials: PositiveInt = 20
    metric: str = ""
    direction: Literal["higher", "lower"] | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    pruner: Literal["none", "median", "hyperband"] = "none"
    seed: NonNegativeInt = 1
    space: dict[str, SearchRange] = Field(default_factory=dict)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there is something to try."""
        if self.sampler == "grid" and not all(field.choices for field in self.space.values()):
            yield "sampler", "a grid needs choices for each path; give choices, or another sampler"
