"""Formats results as plain text. No TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.benchmarks.results import UNKNOWN, Goal, Results, Row, Section, compared

NAME, LABEL = 22, 58  # widths of the first columns


def lines(results: Results) -> Iterator[str]:
    """Yields the lines of the whole table."""
    yield ", ".join(f"{name}: {value}" for name, value in results.machine.items())
    for section in results.sections:
        yield ""
        yield from section_lines(section)
    yield ""
    yield from goal_lines(results)
    if left_out := results.options.get("left out"):
        yield f"sections left out by --quick: {', '.join(left_out)}"
    for section, row in results.failures:
        yield f"FAILED {section.name}/{row.name}: {row.failed}"


def section_lines(section: Section) -> Iterator[str]:
    """Yields the lines of one section."""
    yield f"== {section.name}: {section.title}"
    yield _control(section)
    if section.note:
        yield section.note
    figures = f"{section.unit:>11}{'ratio':>8}{'least':>8}{'most':>8}"
    yield f"{'':<{NAME}}{'':<{LABEL}}{figures}  to"
    for row in section.rows:
        yield _line(section, row).rstrip()


def goal_lines(results: Results) -> Iterator[str]:
    """Yields all goals with their verdicts."""
    goals = results.goals
    if goals:
        yield "== goals"
    for section, row, goal, verdict in goals:
        ratio = section.ratio(row.name, goal.to)
        figure = "-" if ratio is None else f"{ratio:.2f}"
        yield f"{verdict:<18}{figure:>6} {goal!s:<9}{section.name}/{row.name} to {goal.to}"


def _control(section: Section) -> str:
    a, again = section.equals
    ratios = section.ratios(again, a)
    if not ratios:
        return "control (equal code): not measured"
    middle, resolved = section.ratio(again, a), "" if section.is_resolved else "not "
    return (
        f"control (equal code, {again} to {a}): {middle:.3f}, {min(ratios):.2f} to {max(ratios):.2f} in "
        f"{len(ratios)} rounds; a difference of 3 % is {resolved}resolved"
    )


def _line(section: Section, row: Row) -> str:
    start = f"{row.name:<{NAME}}{row.label:<{LABEL}}"
    if row.median is None:
        reason = f"FAILED: {row.failed}" if row.failed else f"not measured: {row.absent}"
        return f"{start}  {reason}"
    ratios = compared(section, row)
    text = f"{start}{_figure(row.median):>11}"
    if ratios:
        text += f"{section.ratio(row.name, row.to):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}  {row.to:<18}"
    return text + "; ".join(f"{_goal(section, row, goal)}" for goal in row.goals)


def _goal(section: Section, row: Row, goal: Goal) -> str:
    verdict = section.verdict(row.name, goal)
    if goal.to == row.to or verdict == UNKNOWN:
        return f"{goal} {verdict}"
    return f"{goal} of {goal.to}: {section.ratio(row.name, goal.to):.2f} {verdict}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
