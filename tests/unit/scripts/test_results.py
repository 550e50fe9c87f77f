"""Ratios, verdicts and the printed table of a measurement."""

from __future__ import annotations

import pytest

from scripts.benchmarks.results import Contender, Measurement, Section, goal_lines, table_lines

BY_HAND = [[100.0, 200.0, 300.0], [100.0, 100.0, 100.0], [10.0, 10.0, 10.0]]
AGAIN = [[104.0, 208.0, 312.0], [98.0] * 3, [9.0] * 3]
OURS = [[95.0, 190.0, 285.0], [95.0] * 3, [9.5] * 3]


def build_measurement(ours: Contender, unit: str = "steps/s") -> Measurement:
    contenders = (Contender("by_hand", "m:f"), Contender("again", "m:f"), ours)
    section = Section(name="dense", title="a small net", contenders=contenders, unit=unit)
    return Measurement(section, {"by_hand": BY_HAND, "again": AGAIN, "ours": OURS})


def test_ratios_are_paired_by_window_with_a_median_of_rounds() -> None:
    result = build_measurement(Contender("ours", "m:f"))

    assert result.ratios("ours", "by_hand") == pytest.approx([0.95, 0.95, 0.95])
    assert result.control_ratios == pytest.approx([1.04, 0.98, 0.9])


@pytest.mark.parametrize(
    ("rounds", "off", "is_resolved"), [(9, 0.02, True), (9, 0.04, False), (8, 0.0, False)]
)
def test_nine_rounds_with_a_good_control_are_resolved(
    rounds: int, off: float, is_resolved: bool
) -> None:
    result = build_measurement(Contender("ours", "m:f"))
    result.values = {"by_hand": [[1.0]] * rounds, "again": [[1 + off]] * rounds}

    assert result.is_resolved == is_resolved


@pytest.mark.parametrize(
    ("bound", "unit", "verdict"),
    [
        (0.8, "steps/s", "met"),
        (0.98, "steps/s", "not resolved"),
        (0.9, "steps/s", "not resolved"),
        (1.2, "steps/s", "not met"),
        (1.2, "ms", "met"),
        (0.92, "ms", "not resolved"),
        (0.8, "ms", "not met"),
    ],
)
def test_few_rounds_decide_a_goal_that_is_far_off_only(
    bound: float, unit: str, verdict: str
) -> None:
    result = build_measurement(Contender("ours", "m:f"), unit)

    assert result.verdict("ours", "by_hand", bound) == verdict


def test_the_table_has_the_control_the_ratios_and_verdicts() -> None:
    result = build_measurement(Contender("ours", "m:f", goals={"by_hand": 0.8, "again": 2.0}))

    _, control, _, *rows = table_lines(result)

    assert control.startswith("control (equal code): 0.980, 0.90 to 1.04 in 3 rounds")
    assert rows[2].split() == ["ours", "95", "0.95", "0.95", "0.95", "by_hand"]

    met, missed = goal_lines(result)
    assert met.split() == ["met", "0.95", ">=", "0.8", "dense/ours", "to", "by_hand"]
    assert missed.startswith("not met")


def test_without_figures_the_table_has_the_reason() -> None:
    result = build_measurement(Contender("ours", "m:f", goals={"by_hand": 0.9}))
    del result.values["ours"]
    result.failed["ours"] = "ended with 1: no such key"

    assert list(table_lines(result))[-1].endswith("FAILED: ended with 1: no such key")
    assert next(goal_lines(result)).startswith("not known")
