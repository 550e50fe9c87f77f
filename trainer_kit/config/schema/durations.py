"""Durations in a config, such as "3 epochs", "20 %" of the run or "30 min"; a plain number counts steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trainer_kit.errors import near_names

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
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FORM = re.compile(rf"\s*({_NUMBER.pattern})\s*([^\W\d_]+|%)\s*")


@dataclass(frozen=True)
class Duration:
    """A duration with its unit.

    Attributes:
      amount: The number of epochs, the share of the run, or the number of seconds; above 0.
      unit: EPOCHS, SHARE or SECONDS.
    """

    amount: Fraction
    unit: str


def read_duration(text: str) -> Duration | None:
    """Returns the duration that `text` means; None if it is not one."""
    form = _FORM.fullmatch(text)
    if form is None or form[2].lower() not in _WORDS:
        return None
    unit, factor = _WORDS[form[2].lower()]
    amount = Fraction(form[1]) * factor
    return Duration(amount, unit) if amount > 0 and not (unit == SHARE and amount > 1) else None


def unit_of(value: Any) -> str | None:
    """Returns the unit of a field's value if it is a duration; None for a number of steps and any other value."""
    duration = read_duration(value) if isinstance(value, str) else None
    return duration.unit if duration else None


def seconds_of(value: Any) -> float:
    """Returns the seconds of a field's value if it is a time; 0 for any other value."""
    duration = read_duration(value) if isinstance(value, str) else None
    return float(duration.amount) if duration and duration.unit == SECONDS else 0.0


@dataclass(frozen=True)
class Durations:
    """Marks a field that takes durations, in Annotated[int, Durations(...)]; of text, it takes nothing else.

    Tasks and trainers see steps: run/durations.py replaces epochs and shares before they are built.

    Attributes:
      units: The units of the durations.
      ge: The smallest number of steps; None: the field does not take a number of steps.
    """

    units: tuple[str, ...]
    ge: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema of the field: a strict int of at least `ge`, or the text of a duration, as written."""
        del source, handler
        steps = core_schema.int_schema(strict=True, ge=self.ge)
        return core_schema.no_info_wrap_validator_function(self._checked, steps)

    def _checked(self, value: Any, steps: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str) and self.ge is not None:
            return steps(value)
        if unit_of(value) not in self.units:
            raise PydanticCustomError("duration", "{text}", {"text": f"it is not {self.allowed}"})
        return value

    @property
    def allowed(self) -> str:
        """What the field takes, in words."""
        examples = [_EXAMPLES[unit] for unit in self.units]
        listed = " or ".join([", ".join(examples[:-1]), examples[-1]] if examples[1:] else examples)
        steps = "" if self.ge is None else f"a whole number of at least {self.ge}, or "
        return f"{steps}a duration such as {listed}"

    def hint(self, given: Any) -> str:
        """Returns what the user probably meant by `given`, which the field does not take; "" if that is not known."""
        if (form := _FORM.fullmatch(str(given))) is None:
            return self._hint_for_number(str(given))
        amount, word = form[1], form[2].lower()
        if word in ("step", "steps") and self.ge is not None:
            return f"write {amount} for {amount} steps"
        if word in _WORDS:
            limit = "an amount above 0" if not Fraction(amount) else "at most 100 %"
            return f"give {limit}" if _WORDS[word][0] in self.units else ""
        near = near_names(word, [known for known, (unit, _) in _WORDS.items() if unit in self.units])
        return f"did you mean '{amount} {near[0]}'?" if near else ""

    def _hint_for_number(self, number: str) -> str:
        if not _NUMBER.fullmatch(number) or not Fraction(number):
            return ""
        if self.ge is None:
            return f"write '{number} s' for {number} seconds"
        share = 100 * Fraction(number)
        return f"write '{float(share):g} %' for that share of the run" if share < 100 and SHARE in self.units else ""


if TYPE_CHECKING:  # who writes a config gives numbers or text, and tasks and trainers read numbers
    RunSteps: TypeAlias = Any
    LoopSteps: TypeAlias = Any
    PartOfRun: TypeAlias = Any
    SaveInterval: TypeAlias = Any
    KeepInterval: TypeAlias = Any
    TimeSpan: TypeAlias = Any
else:
    RunSteps = Annotated[int, Durations((EPOCHS,), ge=-1)]
    LoopSteps = Annotated[int, Durations((EPOCHS,), ge=1)]
    PartOfRun = Annotated[int, Durations((EPOCHS, SHARE), ge=1)]
    SaveInterval = Annotated[int, Durations((EPOCHS, SHARE, SECONDS), ge=1)]
    KeepInterval = Annotated[int, Durations((EPOCHS, SECONDS), ge=1)]
    TimeSpan = Annotated[str, Durations((SECONDS,))]


def interval_rules(options: Any) -> Iterator[tuple[str, str]]:
    """Yields (field, message) for each broken rule of the intervals in the section trainer.

    Args:
      options: The section, a TrainerConfig.
    """
    loop, summary, save = options.steps_per_loop, options.summary_interval, options.checkpoint_interval
    if isinstance(loop, int) and isinstance(summary, int) and summary % loop and summary != SUMMARY_INTERVAL:
        yield (
            "summary_interval",
            f"{summary} is not a multiple of steps_per_loop ({loop}); "
            "summaries are written at the end of a loop, so set it to a multiple",
        )
    for name, value in (("checkpoint_interval", save), ("summary_interval", summary)):
        if options.require_exact_resume and unit_of(value) == SECONDS:
            yield (
                name,
                f"{value!r} comes at steps that differ from run to run, which require_exact_resume=true forbids; "
                "give steps, epochs or a share of the run",
            )
