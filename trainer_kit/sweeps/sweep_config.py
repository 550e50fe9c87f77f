"""The config of a sweep: what the file of `trainer-kit sweep --optuna` contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


@configclass
class SearchRange(Config):
    """The values that a sweep tries for one hyper-parameter: a list of choices, or a range.

    Attributes:
      choices: The values to choose from.
      low, high: The smallest and the largest value. If both are whole numbers, all values are.
      log: Whether values are drawn on a logarithmic scale.
      step: The distance of two neighbouring values; unset means 1 for whole numbers, and any value
        for other ranges.
    """

    choices: tuple[Any, ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are either choices or a range."""
        low = self.low
        high = self.high
        has_choices = bool(self.choices)
        has_range = low is not None and high is not None
        if has_choices == has_range:
            yield "choices", "there are either choices or low and high; give one of both"
        if low is None or high is None:
            return
        if low > high:
            yield "low", f"{low} is above high, {high}; exchange them"
        if self.log and low <= 0:
            yield "low", f"a logarithmic range cannot contain {low}; begin above 0"
        if self.log and self.step:
            yield "step", "a logarithmic range has no steps; remove step or log"

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
            return trial.suggest_categorical(path, self.get_labels())
        low = self.low
        high = self.high
        assert low is not None and high is not None
        if isinstance(low, int) and isinstance(high, int):
            step = int(self.step or 1)
            return trial.suggest_int(path, low, high, step=step, log=self.log)
        return trial.suggest_float(path, low, high, step=self.step, log=self.log)


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
        """Checks that a grid has only choices."""
        ranges = self.space.values()
        has_only_choices = all(values.choices for values in ranges)
        if self.sampler == "grid" and not has_only_choices:
            yield "sampler", "a grid has only choices; give choices, or another sampler"


def format_override(path: str, value: object) -> str:
    """Returns a value as --params_override takes it. A text may be a list in JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{path}={text}"
