"""Measures how cost grows with steps, parameters, variables, metrics, replicas and actions, against a loop by hand.

Beyond ten thousand steps it is the dense net only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.benchmarks.race import Contender, Outcome, Plan, race
from scripts.benchmarks.results import Goal, Row, Section
from scripts.benchmarks.subject import BY_HAND, OURS
from scripts.benchmarks.subjects import SAVES
from tests.fork_server import ForkServer

LOOP = 1000  # steps
DECADES = (1e4, 1e5, 1e6)  # ends of the ranges of steps, the first of which begins after a loop
SHORT_RUNS, LONG_RUNS = 6, 2
FLAT, LINEAR = 1.03, 1.1
NOTE = "where TensorFlow itself is not linear, the loop by hand is not either"
SIZES = (1e4, 1e5, 1e6, 1e7, 1e8)  # parameters
VARIABLES = (10, 100, 1000, 5000)
LINES = {"by_hand": "by hand", "again": "by hand, again", "ours": "ours"}

Options = Callable[[float, str], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A section to measure, point by point.

    Attributes:
      name, title, unit: See Section.
      points: The values of the quantity that grows.
      equal_at: The point at which the hand-written loop runs twice; None: the first point.
      runs: Line -> "module:function".
      options: Returns the keyword arguments of the run at a point of a line.
      plan: The rounds and durations at each point.
      scale: Units per second.
    """

    name: str
    title: str
    points: Sequence[float]
    runs: Mapping[str, str]
    options: Options
    plan: Plan
    equal_at: float | None = None
    unit: str = "us/step"
    scale: float = 1e6

    def race(self, running: ForkServer) -> dict[float, Outcome]:
        """Measures all points, one after the other."""
        return {x: race(running, list(self.contenders(x)), self.plan, f"{self.name} {x:g}") for x in self.points}

    def section(self, outcomes: Mapping[float, Outcome]) -> Section:
        """Returns the cost at each point."""
        rows = []
        for x, outcome in outcomes.items():
            for contender in self.contenders(x):
                row = contender.row()
                row.values = outcome.costs(contender.name, self.scale)
                row.failed = outcome.failed.get(contender.name, "")
                rows.append(row)
        return Section(name=self.name, title=self.title, unit=self.unit, rows=rows, equals=self.equals)

    @property
    def equals(self) -> tuple[str, str]:
        """The names of the two rows of equal code."""
        return f"by_hand_{self._equal_at:g}", f"again_{self._equal_at:g}"

    @property
    def _equal_at(self) -> float:
        return self.points[0] if self.equal_at is None else self.equal_at

    def contenders(self, x: float) -> Iterator[Contender]:
        """Yields the contenders at a point."""
        for name, label in LINES.items():
            if name == "again" and x != self._equal_at:
                continue
            line = "ours" if name == "ours" else "by_hand"
            yield Contender(
                name=f"{name}_{x:g}",
                label=f"{label}, {x:,.0f}",
                run=self.runs[line],
                options=self.options(x, line),
                to="" if name == "by_hand" else f"by_hand_{x:g}",
                line="" if name == "again" else label,
                x=x,
            )


def _trains(name: str, title: str, points: Sequence[float], options: Options, plan: Plan) -> Growth:
    runs = {"by_hand": f"{BY_HAND}:train", "ours": f"{OURS}:train"}
    return Growth(name=name, title=title, points=points, runs=runs, options=options, plan=plan)


PLAN = Plan(rounds=2, windows=4, seconds=0.5)
NAMES = ("steps", "variables", "parameters", "save_stall", "resume", "metrics", "replicas", "actions")


def parameters() -> Growth:
    """Returns the cost of a step of three dense layers."""
    loops = dict(zip(SIZES, (1000, 500, 100, 10, 2), strict=True))

    def options(x: float, line: str) -> Mapping[str, Any]:
        sized = {"size": int(x)}
        return {"net": "wide", "loop": loops[x], **({"task": sized} if line == "ours" else sized)}

    return _trains("parameters", "cost of a step against parameters, three dense layers", SIZES, options, PLAN)


def variables() -> Growth:
    """Returns the cost of a step of a net of many short variables."""
    loops = dict(zip(VARIABLES, (1000, 200, 100, 20), strict=True))

    def options(x: float, line: str) -> Mapping[str, Any]:
        sized = {"size": int(x)}
        return {"net": "many", "loop": loops[int(x)], **({"task": sized} if line == "ours" else sized)}

    growth = _trains("variables", "cost of a step against variables", VARIABLES, options, PLAN)
    return replace(growth, equal_at=VARIABLES[-2])


def metrics() -> Growth:
    """Returns the cost of a step of the dense net with many metrics."""

    def options(x: float, line: str) -> Mapping[str, Any]:
        many = {"metrics": int(x)}
        return {"net": "dense", "loop": 100, **({"task": many} if line == "ours" else many)}

    return _trains("metrics", "cost of a step against metrics, dense, loops of 100", (1, 10, 30, 100), options, PLAN)


def actions() -> Growth:
    """Returns the cost of a step of the dense net with many callbacks after each loop."""

    def options(x: float, line: str) -> Mapping[str, Any]:
        return {"net": "dense", "loop": 100, "actions": int(x)}

    return _trains("actions", "cost of a step against callbacks, dense, loops of 100", (0, 1, 10, 50), options, PLAN)


def replicas() -> Growth:
    """Returns the cost of a step of the dense net on virtual CPUs."""

    def options(x: float, line: str) -> Mapping[str, Any]:
        count = {"runtime": {"virtual_cpus": int(x)}} if line == "ours" else {"replicas": int(x)}
        return {"net": "dense", "loop": 100, **count}

    runs = {"by_hand": f"{BY_HAND}:train_replicas", "ours": f"{OURS}:train"}
    title = "cost of a step against replicas on virtual CPUs, dense, the global batch always 32"
    return Growth(name="replicas", title=title, points=(1, 2, 4), runs=runs, options=options, plan=PLAN)


def stalls() -> Growth:
    """Returns the time that a save stops the loop: synchronous by hand, in the background in trainer_kit."""

    def options(x: float, line: str) -> Mapping[str, Any]:
        return {"net": "wide", "size": int(x), **({"background": True} if line == "ours" else {})}

    return Growth(
        name="save_stall",
        title="stall of a save against parameters",
        points=SIZES,
        runs={"by_hand": f"{SAVES}:save_by_hand", "ours": f"{SAVES}:save"},
        options=options,
        plan=Plan(rounds=1, windows=4, seconds=0, warm_up=0),
        unit="ms",
        scale=1e3,
    )


def resumes() -> Growth:
    """Returns the time from an imported TensorFlow to the first step of a resumed run."""

    def options(x: float, line: str) -> Mapping[str, Any]:
        return {"net": "wide", "size": int(x), "resumes": True}

    return Growth(
        name="resume",
        title="resume, from an imported TensorFlow to the first step, against parameters",
        points=SIZES,
        runs={"by_hand": f"{SAVES}:start_by_hand", "ours": f"{SAVES}:start"},
        options=options,
        plan=Plan(rounds=1, windows=3, seconds=0, warm_up=0),
        unit="ms",
        scale=1e3,
    )


def measure(running: ForkServer, only: Sequence[str] = (), rounds: int = 0) -> Iterator[Section]:
    """Yields all sections, or those named in `only`; `rounds`, if not 0, replaces their own number of rounds."""
    if not only or "steps" in only:
        yield steps(running, rounds or SHORT_RUNS, rounds or LONG_RUNS)
    for growth in (variables(), parameters(), stalls(), resumes(), metrics(), replicas(), actions()):
        if only and growth.name not in only:
            continue
        growth = replace(growth, plan=replace(growth.plan, rounds=rounds or growth.plan.rounds))
        outcomes = growth.race(running)
        section = growth.section(outcomes)
        yield section
        if growth.name == "variables":
            yield per_variable(section)
            yield starts(growth, outcomes)


def steps(running: ForkServer, short_runs: int, long_runs: int) -> Section:
    """Returns the cost of a step by the number of steps done, relative to the hand-written loop at the same moment."""
    options = {"net": "dense", "loop": LOOP}
    contenders = [
        Contender(name=name, label=label, run=f"{OURS if name == 'ours' else BY_HAND}:train", options=options)
        for name, label in LINES.items()
    ]
    ratios: dict[tuple[str, float], list[float]] = {}
    failed: dict[str, str] = {}
    for rounds, until in ((short_runs, DECADES[0]), (long_runs, DECADES[-1])):
        plan = Plan(rounds=rounds, windows=10**6, seconds=0.1, warm_up=0, until=int(until), settles_within=0)
        outcome = race(running, contenders, plan, f"steps up to {until:,.0f}")
        failed.update(outcome.failed)
        for name, base in itertools.product(("again", "ours"), ("by_hand",)):
            for own, other in zip(outcome.windows[name], outcome.windows[base], strict=False):
                for decade, ratio in by_decade(own, other).items():
                    ratios.setdefault((name, decade), []).append(ratio)
    rows = [_decade_row(name, decade, ratios, failed) for name in ("again", "ours") for decade in DECADES]
    first, last = (f"ours_{decade:g}" for decade in (DECADES[0], DECADES[-1]))
    rows[-1] = replace(rows[-1], goals=(Goal(to=first, bound=FLAT, at_most=True),))
    return Section(
        name="steps",
        title="cost of a step against steps done, dense, default settings, loops of 1,000",
        unit="of by hand",
        rows=rows,
        equals=(first.replace("ours", "again"), last.replace("ours", "again")),
    )


def by_decade(own: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> dict[float, float]:
    """Returns, for each decade of steps that was reached, the median ratio of the costs of a step.

    Args:
      own: Windows, as (count, seconds), in order.
      other: The windows of another process, taken at the same moments.
    """
    found: dict[float, list[float]] = {}
    done = LOOP  # the first one came before all windows
    for (count, seconds), (others_count, others_seconds) in zip(own, other, strict=True):
        done += count
        decade = next((decade for decade in DECADES if done <= decade), None)
        if decade is not None:
            found.setdefault(decade, []).append((seconds / count) / (others_seconds / others_count))
    return {decade: statistics.median(ratios) for decade, ratios in found.items()}


def _decade_row(
    name: str, decade: float, ratios: Mapping[tuple[str, float], list[float]], failed: Mapping[str, str]
) -> Row:
    values = ratios.get((name, decade), [])
    return Row(
        name=f"{name}_{decade:g}",
        label=f"{LINES[name]}, up to {decade:,.0f}",
        to=f"{name}_{DECADES[0]:g}",
        values=[[statistics.median(values)]] if values else [],
        failed=failed.get(name, failed.get("by_hand", "")),
        line=LINES[name],
        x=decade,
    )


def per_variable(section: Section) -> Section:
    """Returns the cost of each further variable, which is constant if cost is linear."""
    return _slopes(section, "variables_each", "cost of a step for each further variable", "us/step")


def starts(growth: Growth, outcomes: Mapping[float, Outcome]) -> Section:
    """Returns the start-up cost of each further variable, without the import of TensorFlow."""
    section = growth.section(outcomes)
    for row in section.rows:
        taken = outcomes[row.x].starts[row.name]
        loop = growth.options(row.x, "by_hand")["loop"]
        step = (row.median or 0.0) / growth.scale
        row.values = [[1e3 * (seconds - loop * step)] for seconds in taken]
    return _slopes(section, "variables_start", "start-up for each further variable, TensorFlow's import apart", "ms")


def _slopes(section: Section, name: str, title: str, unit: str) -> Section:
    """Returns for each row the cost difference to its line's first point, divided by the difference in variables."""
    rows, (before, last) = [], VARIABLES[-2:]
    for row in section.rows:
        first = section.row(f"{row.name.rpartition('_')[0]}_{VARIABLES[0]}".replace("again", "by_hand"))
        if first is None or row is first:
            continue
        slopes = [
            [(value - least) / (row.x - first.x) for value, least in zip(own, base, strict=True)]
            for own, base in zip(row.values, first.values, strict=False)
        ]
        aims = (f"ours_{before}", f"by_hand_{last}") if row.name == f"ours_{last}" else ()
        goals = tuple(Goal(to=to, bound=LINEAR, at_most=True) for to in aims)
        rows.append(replace(row, values=slopes, goals=goals))
    return Section(name=name, title=title, unit=unit, rows=rows, equals=section.equals, note=NOTE)
