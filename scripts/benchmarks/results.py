"""Contenders, figures and verdicts, and how they are printed. No TensorFlow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# This many rounds resolve a difference of 3 %, if equal code differs by no more.
ROUNDS = 9
MOST_ROUNDS = 15
RESOLUTION = 0.03

# Units of costs, for each second. Other units are rates: counts per second.
COST_UNITS = {"us/step": 1e6, "ms": 1e3, "s": 1.0, "MiB": 1.0}
CONTROL = "again"


@dataclass(frozen=True)
class Contender:
    """A program whose speed is measured: a row of the table.

    Attributes:
      name: The name, unique in its section.
      run: "module:function". The function takes a Pacer, a folder and `options`, prepares what is
        measured, and then repeats it for ever, in a process of its own.
      options: Keyword arguments of the function.
      goals: Row -> bound on the ratio to it: of a rate the least ratio, of a cost the greatest.
      to: The row that it is compared with; "" for the first row of its goals, or else of its
        section.
      skip: The number of steps before the measurement.
    """

    name: str
    run: str
    options: Mapping[str, Any] = field(default_factory=dict)
    goals: Mapping[str, float] = field(default_factory=dict)
    to: str = ""
    skip: int = 0


@dataclass(frozen=True, kw_only=True)
class Section:
    """Contenders that take turns, in one unit.

    Attributes:
      name, title: For people; `name` also selects the section.
      contenders: The rows. The one called "again" is the control: the same code as the first row,
        in a process of its own.
      unit: A rate, or a cost of COST_UNITS.
      rounds: The number of rounds. Each starts all processes again.
      most_rounds: The number of rounds if `rounds` do not resolve a difference of 3 %.
      windows: The readings of each contender in a round.
      seconds: The least length of a window; 0: a window is one save, one start or one command.
      is_growth: Whether the section shows how a cost grows.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    unit: str = "steps/s"
    rounds: int = 2
    most_rounds: int = 0
    windows: int = 3
    seconds: float = 0.5
    is_growth: bool = False

    @property
    def base(self) -> str:
        """The row that the others are compared with unless they name another."""
        return self.contenders[0].name

    def get_reference(self, contender: Contender) -> str:
        """Returns the row that a contender is compared with."""
        return contender.to or next(iter(contender.goals), self.base)

    def select(self, names: Iterable[str]) -> Section:
        """Returns the section with some rows, those they are compared with, and the control."""
        wanted = {*names, self.base, CONTROL}
        for contender in self.contenders:
            if contender.name in wanted:
                wanted |= {self.get_reference(contender), *contender.goals}
        rows = [contender for contender in self.contenders if contender.name in wanted]
        return replace(self, contenders=rows)


@dataclass
class Measurement:
    """The figures of one section.

    Attributes:
      section: The section.
      values: Readings by contender and round. Readings at the same place in two contenders were
        taken shortly after each other.
      failed: The reasons why contenders have no readings.
    """

    section: Section
    values: dict[str, list[list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Returns the median of the rounds' medians; None without readings."""
        rounds = self.values.get(name, [])
        return statistics.median(map(statistics.median, rounds)) if rounds else None

    def ratios(self, name: str, to: str) -> list[float]:
        """Returns the ratio of one row to another in each round.

        It is a median over pairs of readings.
        """
        rounds = zip(self.values.get(name, []), self.values.get(to, []), strict=False)
        return [
            statistics.median(a / b for a, b in zip(readings, base, strict=True))
            for readings, base in rounds
        ]

    @property
    def control_ratios(self) -> list[float]:
        """The ratio of equal code in each round."""
        return self.ratios(CONTROL, self.section.base)

    @property
    def is_resolved(self) -> bool:
        """Whether a difference of 3 % is resolved: nine rounds, and a control within 3 % of 1."""
        ratios = self.control_ratios
        return len(ratios) >= ROUNDS and abs(statistics.median(ratios) - 1) <= RESOLUTION

    def verdict(self, name: str, to: str, bound: float) -> str:
        """Returns whether a row reaches a goal.

        A section that is not resolved decides a goal only if the ratio is farther from the bound
        than equal code was from 1 in any round.
        """
        ratios = self.ratios(name, to)
        if not ratios:
            return "not known"
        ratio = statistics.median(ratios)
        spread = max((abs(ratio - 1) for ratio in self.control_ratios), default=math.inf)
        if not self.is_resolved and abs(ratio - bound) <= bound * spread:
            return "not resolved"
        is_cost = self.section.unit in COST_UNITS
        is_met = ratio <= bound if is_cost else ratio >= bound
        return "met" if is_met else "not met"


def table_lines(measurement: Measurement) -> Iterator[str]:
    """Yields the lines of one section."""
    section = measurement.section
    yield f"== {section.name}: {section.title}"

    control = measurement.control_ratios
    if control:
        yield (
            f"control (equal code): {statistics.median(control):.3f}, {min(control):.2f} to "
            f"{max(control):.2f} in {len(control)} rounds; a difference of 3 % is "
            f"{'' if measurement.is_resolved else 'not '}resolved"
        )
    else:
        yield "control (equal code): not measured"

    yield f"{'':<24}{section.unit:>11}{'ratio':>8}{'least':>8}{'most':>8}  to"
    for contender in section.contenders:
        name = contender.name
        median = measurement.median(name)
        if median is None:
            yield f"{name:<24}  FAILED: {measurement.failed.get(name, '')}"
            continue

        line = f"{name:<24}" + (f"{median:>11,.0f}" if median >= 100 else f"{median:>11.3g}")
        reference = section.get_reference(contender)
        ratios = measurement.ratios(name, reference)
        if ratios and reference != name:
            line += f"{statistics.median(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}"
            line += f"  {reference}"
        yield line


def goal_lines(measurement: Measurement) -> Iterator[str]:
    """Yields the goals of one section with their verdicts."""
    section = measurement.section
    sign = "<=" if section.unit in COST_UNITS else ">="
    for contender in section.contenders:
        for to, bound in contender.goals.items():
            ratios = measurement.ratios(contender.name, to)
            figure = f"{statistics.median(ratios):.2f}" if ratios else "-"
            verdict = measurement.verdict(contender.name, to, bound)
            comparison = f"{section.name}/{contender.name} to {to}"
            yield f"{verdict:<14}{figure:>6} {sign} {bound:<6g}{comparison}"
