"""Subject: a section of the table to measure, and the contenders that most sections have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.benchmarks.race import Contender, Outcome, Plan, race
from scripts.benchmarks.results import MOST_ROUNDS, ROUNDS, Goal, Row, Section
from tests.fork_server import ForkServer

BY_HAND, OURS = "scripts.benchmarks.by_hand", "scripts.benchmarks.ours"
LOOP = 100  # steps
# Of nets whose loops of 1,000 steps take 0.1 to 0.4 seconds.
SMALL_STEPS = Plan(rounds=ROUNDS, most_rounds=MOST_ROUNDS, windows=4, seconds=0.4, warm_up=0.7)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A section to measure.

    Attributes:
      name, title, unit, equals, note: See Section.
      contenders: The contenders; the others are compared with the first one unless they name another.
      plan: The number and length of measurements.
      scale: Units per second, for costs; 0: the unit is counts per second.
      quick_rounds: The rounds of a quick measurement; 0: the section is left out.
    """

    name: str
    title: str
    unit: str
    contenders: tuple[Contender, ...]
    plan: Plan
    equals: tuple[str, str] = ("by_hand", "again")
    scale: float = 0.0
    note: str = ""
    quick_rounds: int = 1

    def only(self, names: Iterable[str]) -> Subject:
        """Returns the subject with the named contenders, those that they are compared with, and the two equal ones."""
        wanted, by_name = {*names, *self.equals}, {one.name: one for one in self.contenders}
        for name in list(wanted):
            wanted |= {by_name[name].to, *(goal.to for goal in by_name[name].goals)}
        return replace(self, contenders=tuple(one for one in self.contenders if one.name in wanted))

    def quick(self, names: Iterable[str] | None = None) -> Subject:
        """Returns the subject with the rounds of a quick measurement, and its quick contenders or the named ones."""
        some = self.only(names or (one.name for one in self.contenders if one.quick))
        left = [one.name for one in self.contenders if one not in some.contenders]
        note = f"--quick leaves out: {', '.join(left)}" if left and not names else ""
        plan = replace(self.plan, rounds=self.quick_rounds, most_rounds=0, windows=min(3, self.plan.windows))
        return replace(some, plan=plan, note=" ".join(filter(None, [self.note, note])))

    def measure(self, running: ForkServer) -> Section:
        """Measures it."""
        suffices = lambda outcome: self._section(outcome).is_resolved  # noqa: E731
        return self._section(race(running, self.contenders, self.plan, self.name, suffices))

    def _section(self, outcome: Outcome) -> Section:
        rows = [self.row(contender, outcome) for contender in self.contenders]
        given = {name: getattr(self, name) for name in ("name", "title", "unit", "equals", "note")}
        return Section(**given, rows=rows)

    def row(self, contender: Contender, outcome: Outcome) -> Row:
        """Returns the row of a contender, with its figures."""
        row, name = contender.row(), contender.name
        row.values = outcome.costs(name, self.scale) if self.scale else outcome.rates(name)
        row.failed = outcome.failed.get(name, "")
        return row


def at_least(bound: float, to: str = "by_hand") -> Goal:
    """Returns the goal of a ratio of at least `bound`."""
    return Goal(to=to, bound=bound)


def by_hand(options: Mapping[str, Any], label: str = "by hand", function: str = "train") -> Iterator[Contender]:
    """Yields the hand-written loop twice."""
    run = f"{BY_HAND}:{function}"
    yield Contender(name="by_hand", label=label, run=run, options=options, quick=True)
    yield Contender(name="again", label=f"{label}, again", run=run, options=options, to="by_hand", quick=True)


def ours(
    name: str, label: str, net: str, *goals: Goal, loop: int = 0, to: str = "by_hand", **options: Any
) -> Contender:
    """Returns trainer_kit with some settings; a contender with goals is included in quick measurements."""
    given = {"net": net, "loop": loop or LOOP, **options}
    run = f"{OURS}:train"
    return Contender(name=name, label=label, run=run, options=given, to=to, goals=goals, quick=bool(goals))
