"""The config of a sweep: what the file of `trainer-kit sweep --optuna` contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import PositiveInt

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


@configclass
class SearchRange(Config):
    """The values that a sweep tries for one hyper-parameter: a list of choices, or a range.

    Attributes:
      choices: The values to choose from.
      low, high: The smallest and the largest value. If both are whole numbers, all values are.
      log: Whether values of a range are drawn on a logarithmic scale.
    """

    choices: tuple[Any, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are either choices or a range."""
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        expected_count = 0 if self.choices else 2
        if len(bounds) != expected_count or (self.choices and self.log):
            yield "choices", "give either choices, or low and high of a range"
        elif bounds != sorted(bounds):
            yield "low", f"{self.low} is above high, {self.high}; exchange them"
        elif self.log and bounds[0] <= 0:
            yield "low", f"a logarithmic range cannot contain {self.low}; begin above 0"

    def get_labels(self) -> list[str | int | float | bool | None]:
        """Returns the choices as Optuna stores them. Lists and mappings are texts in JSON."""
        labels = []
        for choice in self.choices:
            is_structure = isinstance(choice, (list, dict))
            label = json.dumps(choice) if is_structure else choice
            labels.append(label)
        return labels

    def suggest(self, trial: BaseTrial, path: str) -> Any:
        """Returns the value that `trial` has at `path`, which is drawn at the first call.

        Raises:
          ValueError: when there is no such range.
        """
        if self.choices:
            labels = self.get_labels()
            label = trial.suggest_categorical(path, labels)
            position = labels.index(label)
            return self.choices[position]
        low = self.low
        high = self.high
        assert low is not None and high is not None
        if isinstance(low, int) and isinstance(high, int):
            return trial.suggest_int(path, low, high, log=self.log)
        return trial.suggest_float(path, low, high, log=self.log)


@configclass
class SweepConfig(Config):
    """What a sweep tries, and how Optuna chooses.

    Attributes:
      trials: The number of trials; sampler=grid tries all combinations instead.
      sampler: How values are drawn: `tpe` learns from finished trials, and `grid` tries all
        combinations of choices.
      pruner: What ends a trial early: `median` if its metric is worse than the median of the
        earlier trials at the same step.
      space: The search range of each hyper-parameter, by its path in the config.
    """

    trials: PositiveInt = 20
    sampler: Literal["tpe", "grid"] = "tpe"
    pruner: Literal["none", "median"] = "none"
    space: dict[str, SearchRange] = Field(default_factory=dict)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that a grid has only choices."""
        has_only_choices = all(values.choices for values in self.space.values())
        if self.sampler == "grid" and not has_only_choices:
            yield "sampler", "a grid has only choices; give choices, or another sampler"


def format_override(path: str, value: object) -> str:
    """Returns a value as --params_override reads it."""
    text = json.dumps(value)
    return f"{path}={text}"
