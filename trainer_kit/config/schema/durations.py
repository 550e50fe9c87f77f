"""Durations in a config, such as "3 epochs", "20 %" of the run or "30 min".

A plain number counts steps. An epoch may have a fraction of a step: 103 examples in batches of 10
are 10.3 steps, and epoch e ends with step ceil(e * 10.3). So steps that come from epochs or a share
keep their fraction: an event is due at the first step that reaches a multiple of its interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trainer_kit.errors import find_similar_names

# The default of trainer.summary_interval, which fits any steps_per_loop.
SUMMARY_INTERVAL = 1000

EPOCHS = "epochs"
SHARE = "share"
SECONDS = "seconds"

# The unit of each word, and how much of the unit the word stands for.
_WORDS: dict[str, tuple[str, Fraction]] = {
    **dict.fromkeys(("epochs", "epoch"), (EPOCHS, Fraction(1))),
    **dict.fromkeys(("%", "percent"), (SHARE, Fraction(1, 100))),
    **dict.fromkeys(("s", "seconds", "second", "sec"), (SECONDS, Fraction(1))),
    **dict.fromkeys(("min", "minutes", "minute", "m"), (SECONDS, Fraction(60))),
    **dict.fromkeys(("h", "hours", "hour"), (SECONDS, Fraction(3600))),
    **dict.fromkeys(("days", "day", "d"), (SECONDS, Fraction(86400))),
}
_EXAMPLES = {EPOCHS: "'3 epochs'", SHARE: "'20 %'", SECONDS: "'30 min'"}
_DURATION_PATTERN = re.compile(r"\s*(\d*\.?\d+)\s*([^\W\d_]+|%)\s*")

# A number of steps.
Interval: TypeAlias = int | Fraction


class Duration(str):
    """A duration as it is written in a config.

    It stays text until the length of an epoch is known.

    Attributes:
      amount: The number of epochs, the share of the run, or the number of seconds. It is above 0.
      unit: EPOCHS, SHARE or SECONDS.
    """

    amount: Fraction
    unit: str

    @classmethod
    def parse(cls, value: object) -> Duration | None:
        """Returns the duration that a value such as "3 epochs" means, or None if it is not one."""
        if not isinstance(value, str):
            return None
        match = _DURATION_PATTERN.fullmatch(value)
        if match is None:
            return None
        word = match[2].lower()
        if word not in _WORDS:
            return None

        # No duration is empty, and no share is more than the run.
        unit, factor = _WORDS[word]
        number = Fraction(match[1])
        amount = number * factor
        is_more_than_run = unit == SHARE and amount > 1
        if amount <= 0 or is_more_than_run:
            return None

        duration = cls(value)
        duration.amount = amount
        duration.unit = unit
        return duration


class RoundedSteps(int):
    """The steps that a duration has become, rounded up to a whole number for tasks and trainers.

    Attributes:
      exact: The same steps with their fraction, at whose multiples events are due.
    """

    exact: Fraction

    def __new__(cls, exact: Fraction | int) -> RoundedSteps:
        """Rounds up."""
        whole_steps = math.ceil(exact)
        steps = super().__new__(cls, whole_steps)
        steps.exact = Fraction(exact)
        return steps


def get_exact_steps(interval: Interval) -> Interval:
    """Returns an interval with the fraction of a step that its duration has."""
    if isinstance(interval, RoundedSteps):
        return interval.exact
    return interval


def is_due(before: int, after: int, interval: Interval) -> bool:
    """Whether a multiple of `interval` is after step `before`, and not after step `after`."""
    steps = get_exact_steps(interval)
    multiples_before = before // steps
    multiples_after = after // steps
    return multiples_after > multiples_before


def get_seconds(value: object) -> float:
    """Returns the seconds of a field's value if it is a time, and 0 for any other value."""
    if isinstance(value, Duration) and value.unit == SECONDS:
        return float(value.amount)
    return 0.0


@dataclass(frozen=True)
class DurationField:
    """Marks a field that takes durations, and no other text.

    Tasks and trainers see steps: run/lengths.py replaces epochs and shares before they are built.

    Attributes:
      units: The units of the durations.
      ge: The smallest number of steps. None means that the field does not take a number of steps.
    """

    units: tuple[str, ...]
    ge: int | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Returns the schema of the field: a whole number of at least `ge`, or a duration."""
        del source, handler
        steps = core_schema.int_schema(strict=True, ge=self.ge)
        return core_schema.no_info_wrap_validator_function(self._check, steps)

    def _check(self, value: object, check_steps: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, RoundedSteps):
            return value
        if not isinstance(value, str) and self.ge is not None:
            # 1e6 is a float to YAML and to Python.
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            return check_steps(value)

        duration = Duration.parse(value)
        if duration is None or duration.unit not in self.units:
            message = f"it is not {self.allowed_values}"
            raise PydanticCustomError("duration", "{text}", {"text": message})
        return duration

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Returns the JSON schema of the field, in which a duration is a number with a word."""
        del schema, handler
        return {
            "type": ["integer", "string"],
            "minimum": self.ge or 0,
            "pattern": r"\d\s*[%a-zA-Z]",
        }

    @property
    def allowed_values(self) -> str:
        """What the field takes, in words."""
        *examples, text = [_EXAMPLES[unit] for unit in self.units]
        if examples:
            first_examples = ", ".join(examples)
            text = f"{first_examples} or {text}"
        steps = ""
        if self.ge is not None:
            steps = f"a whole number of at least {self.ge}, or "
        return f"{steps}a duration such as {text}"

    def suggest_correction(self, value: object) -> str:
        """Returns what the user probably meant by a value that the field does not take, or ""."""
        match = _DURATION_PATTERN.fullmatch(str(value))
        if not match:
            return ""

        # A word of this field is right, so the amount is not.
        word = match[2].lower()
        field_words = [text for text, (unit, _) in _WORDS.items() if unit in self.units]
        if word in field_words:
            return "give an amount above 0, and at most 100 %"

        # A word of another field is no misspelling.
        if word in _WORDS:
            return ""
        similar_words = find_similar_names(word, field_words)
        if not similar_words:
            return ""
        return f"did you mean '{match[1]} {similar_words[0]}'?"


# The author of a config gives numbers or text, and tasks and trainers read numbers. Hence
# `int | Any`.
RunSteps: TypeAlias = Annotated[int | Any, DurationField((EPOCHS,), ge=-1)]
StepsInLoop: TypeAlias = Annotated[int | Any, DurationField((EPOCHS,), ge=1)]
PartOfRun: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SHARE), ge=1)]
SaveInterval: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SHARE, SECONDS), ge=1)]
KeepInterval: TypeAlias = Annotated[int | Any, DurationField((EPOCHS, SECONDS), ge=1)]
TimeSpan: TypeAlias = Annotated[str, DurationField((SECONDS,))]


class IntervalOptions(Protocol):
    """The fields of the section trainer that `interval_rules` compares."""

    @property
    def steps_per_loop(self) -> Any:
        """The steps of a training loop."""

    @property
    def summary_interval(self) -> Any:
        """The steps, or the time, between summaries."""

    @property
    def require_exact_resume(self) -> bool:
        """Whether a resumed run has to repeat every step exactly."""


def interval_rules(options: IntervalOptions) -> Iterator[tuple[str, str]]:
    """Yields (field, message) for each broken rule of the intervals in the section trainer.

    Args:
      options: The section, a TrainerConfig.
    """
    loop_steps = options.steps_per_loop
    summary_interval = options.summary_interval

    # Loops are cut where an interval of rounded steps is due, so only plain numbers are compared.
    are_steps = type(loop_steps) is int and type(summary_interval) is int
    # The default interval fits any loop.
    is_default = summary_interval == SUMMARY_INTERVAL
    if are_steps and not is_default and summary_interval % loop_steps:
        yield (
            "summary_interval",
            f"{summary_interval} is not a multiple of steps_per_loop ({loop_steps});"
            " set it to a multiple",
        )

    for name in ("checkpoint_interval", "summary_interval"):
        value = getattr(options, name)
        if options.require_exact_resume and get_seconds(value):
            yield (
                name,
                f"{value!r} comes at steps that differ from run to run,"
                " which require_exact_resume=true forbids; give steps, epochs or a share",
            )
