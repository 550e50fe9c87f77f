"""Figures, goals and verdicts, and their JSON form. No TensorFlow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MET, MISSED, UNRESOLVED, UNKNOWN = "met", "not met", "not resolved", "not known"
ROUNDS, MOST_ROUNDS, RESOLUTION = (
    9,
    15,
    0.03,
)  # so many rounds tell a difference of 3 %, if equal code differs by no more


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on the ratio of a row to the row `to`: at least `bound`, or at most."""

    to: str
    bound: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(kw_only=True)
class Row:
    """One contender in a section.

    Attributes:
      name: The name, unique in its section.
      label: The description for people.
      to: The name of the row that it is compared with; "": it is not compared.
      values: The readings by round. Readings at the same place in two rows were taken shortly after each other.
      goals: The goals for ratios to other rows.
      failed: The reason why there are no figures.
      absent: The reason why the contender was not run.
      line, x: In a section that shows growth, the row's curve and its place on it.
    """

    name: str
    label: str
    to: str = ""
    values: list[list[float]] = field(default_factory=list)
    goals: tuple[Goal, ...] = ()
    failed: str = ""
    absent: str = ""
    line: str = ""
    x: float = 0.0

    @property
    def median(self) -> float | None:
        """The median of the rounds' medians; None without figures."""
        return statistics.median(map(statistics.median, self.values)) if self.values else None


@dataclass(kw_only=True)
class Section:
    """Rows that took turns, in one unit.

    Attributes:
      name, title, unit: for people, and `name` to choose it by.
      rows: in the order of the table.
      equals: two rows of equal code in processes of their own, the control of the section.
      note: what a reader has to know.
    """

    name: str
    title: str
    unit: str
    rows: list[Row]
    equals: tuple[str, str] = ("", "")
    note: str = ""

    def row(self, name: str) -> Row | None:
        """Returns the row called `name`; None if there is none."""
        return next((row for row in self.rows if row.name == name), None)

    def ratios(self, name: str, to: str) -> list[float]:
        """Returns the ratio of one row to another in each round: the median over the pairs of readings."""
        row, base = self.row(name), self.row(to)
        if row is None or base is None:
            return []
        return [
            statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(row.values, base.values, strict=False)
        ]

    def ratio(self, name: str, to: str) -> float | None:
        """Returns the median of `ratios`; None if there are none."""
        ratios = self.ratios(name, to)
        return statistics.median(ratios) if ratios else None

    @property
    def control(self) -> float | None:
        """How far the median ratio of equal code is from 1; None if it was not measured."""
        ratio = self.ratio(self.equals[1], self.equals[0])
        return None if ratio is None else abs(ratio - 1)

    @property
    def spread(self) -> float:
        """How far the ratio of equal code was from 1 in the worst round; infinity if it was not measured."""
        return max((abs(ratio - 1) for ratio in self.ratios(self.equals[1], self.equals[0])), default=math.inf)

    @property
    def is_resolved(self) -> bool:
        """Whether the section tells a difference of 3 %: it has nine rounds, and its control is within 3 % of 1."""
        rounds = len(self.ratios(self.equals[1], self.equals[0]))
        return rounds >= ROUNDS and self.control is not None and self.control <= RESOLUTION

    def verdict(self, name: str, goal: Goal) -> str:
        """Returns whether the row reaches the goal.

        A section that is not resolved decides a goal only if the ratio is farther from the bound than equal code was
        from 1 in any round.
        """
        ratio = self.ratio(name, goal.to)
        if ratio is None:
            return UNKNOWN
        if not self.is_resolved and abs(ratio - goal.bound) <= goal.bound * self.spread:
            return UNRESOLVED
        return MET if (ratio <= goal.bound if goal.at_most else ratio >= goal.bound) else MISSED


@dataclass(kw_only=True)
class Results:
    """A whole measurement: its machine, its options, and its sections."""

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    sections: list[Section]

    @property
    def failures(self) -> list[tuple[Section, Row]]:
        """The rows that were run but have no figures."""
        return [(section, row) for section in self.sections for row in section.rows if row.failed]

    @property
    def goals(self) -> list[tuple[Section, Row, Goal, str]]:
        """All goals with their verdicts."""
        return [
            (section, row, goal, section.verdict(row.name, goal))
            for section in self.sections
            for row in section.rows
            for goal in row.goals
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values: all figures, and the ratios and verdicts derived from them."""
        sections = [
            {**asdict(section), "control": section.control, "rows": [_row_dict(section, row) for row in section.rows]}
            for section in self.sections
        ]
        return {"machine": dict(self.machine), "options": dict(self.options), "sections": sections}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Results:
        """Returns the Results from the value of `to_dict`."""
        return cls(
            machine=value["machine"],
            options=value["options"],
            sections=[
                Section(
                    **{name: section[name] for name in ("name", "title", "unit", "note")},
                    equals=tuple(section["equals"]),
                    rows=[_row(row) for row in section["rows"]],
                )
                for section in value["sections"]
            ],
        )


def compared(section: Section, row: Row) -> Sequence[float]:
    """Returns the ratios of a row to the row that it is compared with; [] if it is not compared."""
    return section.ratios(row.name, row.to) if row.to and row.to != row.name else []


def _row_dict(section: Section, row: Row) -> dict[str, Any]:
    goals = [
        {**asdict(goal), "ratio": section.ratio(row.name, goal.to), "verdict": section.verdict(row.name, goal)}
        for goal in row.goals
    ]
    return {**asdict(row), "median": row.median, "ratios": list(compared(section, row)), "goals": goals}


def _row(value: Mapping[str, Any]) -> Row:
    goals = tuple(Goal(to=goal["to"], bound=goal["bound"], at_most=goal["at_most"]) for goal in value["goals"])
    names = ("name", "label", "to", "values", "failed", "absent", "line", "x")
    return Row(**{name: value[name] for name in names}, goals=goals)
