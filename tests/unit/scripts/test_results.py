"""Ratios, spread, verdicts, and results that go through JSON."""

from __future__ import annotations

import json

import pytest

from scripts.benchmarks import table
from scripts.benchmarks.results import MET, MISSED, UNKNOWN, UNRESOLVED, Goal, Results, Row, Section


def section(*rows: Row, equals: tuple[str, str] = ("a", "again")) -> Section:
    return Section(name="dense", title="a small net", unit="steps/s", rows=list(rows), equals=equals)


A = Row(name="a", label="by hand", values=[[100.0, 200.0, 300.0], [100.0, 100.0, 100.0], [10.0, 10.0, 10.0]])
AGAIN = Row(name="again", label="by hand, again", to="a", values=[[104.0, 208.0, 312.0], [98.0] * 3, [9.0] * 3])


def ours(*values: list[float], **fields: object) -> Row:
    return Row(name="ours", label="ours", to="a", values=list(values), **fields)  # type: ignore[arg-type]


def test_ratios_are_paired_by_window_with_a_median_of_rounds() -> None:
    one = section(A, AGAIN, ours([90.0, 180.0, 270.0], [110.0] * 3, [9.5] * 3))
    assert one.ratios("ours", "a") == pytest.approx([0.9, 1.1, 0.95])
    assert one.ratio("ours", "a") == pytest.approx(0.95)


def test_the_control_is_what_equal_code_is_off_in_the_median() -> None:
    assert section(A, AGAIN).control == pytest.approx(0.02)
    assert section(A, AGAIN).spread == pytest.approx(0.1)
    assert section(A).control is None


@pytest.mark.parametrize(("rounds", "off", "resolved"), [(9, 0.02, True), (9, 0.04, False), (8, 0.0, False)])
def test_nine_rounds_with_a_good_control_are_resolved(rounds: int, off: float, resolved: bool) -> None:
    again = Row(name="again", label="", to="a", values=[[1 + off]] * rounds)
    one = section(Row(name="a", label="", values=[[1.0]] * rounds), again)
    assert one.is_resolved == resolved


@pytest.mark.parametrize(
    ("bound", "at_most", "verdict"),
    [
        (0.8, False, MET),
        (0.98, False, UNRESOLVED),
        (0.9, False, UNRESOLVED),
        (1.2, False, MISSED),
        (1.2, True, MET),
        (0.92, True, UNRESOLVED),
        (0.8, True, MISSED),
    ],
)
def test_few_rounds_decide_a_goal_that_is_far_off_only(bound: float, at_most: bool, verdict: str) -> None:
    one = section(A, AGAIN, ours([95.0, 190.0, 285.0], [95.0] * 3, [9.5] * 3))
    assert one.verdict("ours", Goal(to="a", bound=bound, at_most=at_most)) == verdict


def test_without_figures_the_table_has_the_reason_and_no_goal() -> None:
    one = section(A, AGAIN, ours(failed="ended with 1: no such key", goals=(Goal(to="a", bound=0.9),)))
    results = Results(machine={"cores": 2}, options={}, sections=[one])
    assert one.verdict("ours", Goal(to="a", bound=0.9)) == UNKNOWN
    assert [row.name for _, row in results.failures] == ["ours"]
    assert "FAILED dense/ours: ended with 1: no such key" in list(table.lines(results))


def test_what_is_not_installed_is_told_and_is_no_failure() -> None:
    results = Results(machine={}, options={}, sections=[section(A, AGAIN, ours(absent="torch not installed"))])
    assert results.failures == []
    assert any("not measured: torch not installed" in line for line in table.lines(results))


def test_a_section_opens_with_its_control_and_rows_have_goals() -> None:
    goals = (Goal(to="a", bound=0.8), Goal(to="again", bound=2.0))
    one = section(A, AGAIN, ours([95.0, 190.0, 285.0], [95.0] * 3, [9.5] * 3, goals=goals))
    text = list(table.section_lines(one))
    assert text[1].startswith("control (equal code, again to a): 0.980, 0.90 to 1.04 in 3 rounds")
    assert text[1].endswith("a difference of 3 % is not resolved")
    assert text[-1].endswith(">= 0.8 met; >= 2 of again: 0.97 not met")


def test_results_are_the_same_after_json() -> None:
    point = Row(
        name="p", label="ours, 10", to="a", values=[[1.0] * 3], line="ours", x=1.5, goals=(Goal(to="a", bound=1),)
    )
    results = Results(machine={"cores": 2}, options={"quick": True}, sections=[section(A, AGAIN, point)])
    written = results.to_dict()
    assert Results.from_dict(json.loads(json.dumps(written))) == results
    assert written["sections"][0]["rows"][2]["goals"][0]["verdict"] == MISSED
