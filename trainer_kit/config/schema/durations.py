"""Durations in a config, such as "3 epochs", "20 %" of the run or "30 min"; a plain number counts steps.

An epoch may have a fraction of a step: 103 examples in batches of 10 are 10.3 steps, and epoch e
ends with step ceil(e * 10.3). So steps that come from epochs or a share keep their fraction: an
event is due at the first step that reaches a multiple of its interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trainer_kit.errors import find_similar_names

# The default of trainer.summary_interval, which fits any steps_per_loop.
SUMMARY_INTERVAL = 1000
EPOCHS, SHARE, SECONDS = "epochs", "share", "seconds"
_WORDS: dict[str, tuple[str, Fraction]] = {  # the unit of each word, and how much of the unit it is
    **dict.fromkeys(("epochs", "epoch"), (EPOCHS, Fraction(1))),
    **dict.fromkeys(("%", "percent"), (SHARE, Fraction(1, 100))),
    **dict.fromkeys(("s", "seconds", "second", "sec"), (SECONDS, Fraction(1))),
    **dict.fromkeys(("min", "minutes", "minute", "m"), (SECONDS, Fraction(60))),
    **dict.fromkeys(("h", "hours", "hour"), (SECONDS, Fraction(3600))),
    **dict.fromkeys(("days", "day", "d"), (SECONDS, Fraction(86400))),
}
_EXAMPLES = {EPOCHS: "'3 epochs'", SHARE: "'20 %'", SECONDS: "'30 min'"}
_DURATION_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([^\W\d_]+|%)\s*")
Interval: TypeAlias = int | Fraction  # of steps


class Duration(str):
    """A duration as it is written in a config, where it stays text until the run's epochs are known.

    Attributes:
      amount: The number of epochs, the share of the run, or the number of seconds; above 0.
      unit: EPOCHS, SHARE or SECONDS.
    """

    amount: Fraction
    unit: str

    @classmethod
    def parse(cls, value: Any) -> Duration | None:
        """Returns the duration that a value such as "3 epochs" means; None if it is not one."""
        form = _DURATION_PATTERN.fullmatch(value) if isinstance(value, str) else None
        if form is None or form[2].lower() not in _WORDS:
            return None
        unit, factor = _WORDS[form[2].lower()]
        amount = Fraction(form[1]) * factor
        if amount <= 0 or (unit == SHARE and amount > 1):
            return None
        duration = cls(value)
        duration.amount = amount
        duration.unit = unit
        return duration


class RoundedSteps(int):
    """The steps that a duration has become: a whole number for tasks and trainers, rounded up.

    Attributes:
      exact: The same steps with their fraction, at whose multiples events are due.
    """

    exact: Fraction

    def __new__(cls, exact: Fraction | int) -> RoundedSteps:
        """Rounds up."""
        steps = super().__new__(cls, math.ceil(exact))
        steps.exact = Fraction(exact)
        return steps


def get_exact_steps(interval: Interval) -> Interval:
    """Returns an interval with the fraction of a step that its duration has."""
    return interval.exact if isinstance(interval, RoundedSteps) else interval


def is_due(before: int, after: int, interval: Interval) -> bool:
    """Whether the steps from `before` (excluded) to `after` (included) hold a multiple of `interval`."""
    steps = get_exact_steps(interval)
    return after // steps > before // steps


def get_seconds(value: Any) -> float:
    """Returns the seconds of a field's value if it is a time; 0 for any other value."""
    return float(value.amount) if isinstance(value, Duration) and value.unit == SECONDS else 0.0


@dataclass(frozen=True)
class DurationField:
    """Marks a field that takes durations; of text, it takes nothing else.

    Tasks and trainers see steps: run/lengths.py replaces epochs and shares before they are built.

    Attributes:
      units: The units of the durations.
      ge: The smallest number of steps; None: the field does not take a number of steps.
    """

    units: tuple[str, ...]
    ge: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Returns the schema of the field: a strict int of at least `ge`, or a duration."""
        del source, handler
        steps = core_schema.int_schema(strict=True, ge=self.ge)
        return core_schema.no_info_wrap_validator_function(self._check, steps)

    def _check(self, value: Any, check_steps: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, RoundedSteps):
            return value
        if not isinstance(value, str) and self.ge is not None:
            return check_steps(value)
        duration = Duration.parse(value)
        if duration is None or duration.unit not in self.units:
            raise PydanticCustomError(
                "duration", "{text}", {"text": f"it is not {self.allowed_values}"}
            )
        return duration

    @property
    def allowed_values(self) -> str:
        """What the field takes, in words."""
        *examples, last = [_EXAMPLES[unit] for unit in self.units]
        listed = f"{', '.join(examples)} or {last}" if examples else last
        steps = "" if self.ge is None else f"a whole number of at least {self.ge}, or "
        return f"{steps}a duration such as {listed}"

    def suggest_correction(self, value: Any) -> str:
        """Returns what the user probably meant by a value that the field does not take, or ""."""
        form = _DURATION_PATTERN.fullmatch(str(value))
        word = form[2].lower() if form else ""
        words = [known for known, (unit, _) in _WORDS.items() if unit in self.units]
        if word in words:
            return "give an amount above 0, and at most 100 %"
        near = find_similar_names(word, words) if word not in _WORDS else ()
        return f"did you mean '{form[1]} {near[0]}'?" if form and near else ""


# Who writes a config gives numbers or text, and tasks and trainers read numbers; hence `int | Any`.
RunSteps: TypeAlias = Annotated[int | Any, DurationField((EPOCHS,), ge=-1)]
LoopSteps: TypeAlias = Annotated[int | Any, DurationField((EPOCHS,), ge=1)]
PartOfRun: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SHARE), ge=1)]
SaveInterval: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SHARE, SECONDS), ge=1)]
KeepInterval: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SECONDS), ge=1)]
TimeSpan: TypeAlias = Annotated[str, DurationField((SECONDS,))]


def interval_rules(options: Any) -> Iterator[tuple[str, str]]:
    """Yields (field, message) for each broken rule of the intervals in the section trainer.

    Args:
      options: The section, a TrainerConfig.
    """
    loop, summary = options.steps_per_loop, options.summary_interval
    # Loops are cut where an interval of rounded steps is due.
    in_steps = type(loop) is int and type(summary) is int
    if in_steps and summary % loop and summary != SUMMARY_INTERVAL:
        yield (
            "summary_interval",
            f"{summary} is not a multiple of steps_per_loop ({loop}); set it to a multiple",
        )
    for name in ("checkpoint_interval", "summary_interval"):
        value = getattr(options, name)
        if options.require_exact_resume and get_seconds(value):
            problem = f"{value!r} comes at steps that differ from run to run"
            yield (
                name,
                (
                    f"{problem}, which require_exact_resume=true forbids; give steps, epochs or a"
                    " share"
                ),
            )
