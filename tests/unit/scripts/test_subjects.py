"""What is raced against what: names that fit, and choices that keep what a ratio needs."""

from __future__ import annotations

import pytest

from scripts import bench
from scripts.benchmarks import cold, growth
from scripts.benchmarks.race import Outcome
from scripts.benchmarks.subject import Subject
from scripts.benchmarks.subjects import subjects

SUBJECTS = {subject.name: subject for subject in subjects()}


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_what_a_row_is_compared_with_is_in_its_section(subject: Subject) -> None:
    names = [one.name for one in subject.contenders]
    assert len(set(names)) == len(names)
    compared = {one.to for one in subject.contenders} | {goal.to for one in subject.contenders for goal in one.goals}
    assert {*subject.equals, *compared} - {""} <= set(names)


def test_the_commands_are_compared_with_one_another() -> None:
    assert {command.to for command in cold.COMMANDS} - {""} <= {command.name for command in cold.COMMANDS}


def test_a_chosen_row_brings_the_rows_it_is_compared_with() -> None:
    chosen = SUBJECTS["dense"].only(["ours_fused"])
    assert {one.name for one in chosen.contenders} == {"by_hand", "again", "ours_fused", "fused_by_hand"}


def test_a_quick_measurement_has_the_goals_of_its_sections() -> None:
    for subject in SUBJECTS.values():
        quick = subject.quick()
        assert {one.name for one in subject.contenders if one.goals} <= {one.name for one in quick.contenders}
        assert all(one.name in quick.note for one in subject.contenders if one not in quick.contenders)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only=dense/nothing"], "--only: there is no 'dense/nothing'; did you mean dense"),
        (["--only="], "--only: there is no ''; see --list"),
        (["--only=dense/ours", "--growth"], "there is no 'dense/ours'; leave out --growth"),
        (["--only=variables"], "there is no 'variables'; it needs --growth"),
        (["--rounds=0"], "--rounds: 0 is less than 1"),
        (["--show=nowhere"], "--show: there is no nowhere/bench.json"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_before_anything_runs(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_rows_that_are_named_are_measured_quickly_too() -> None:
    dense = SUBJECTS["dense"].quick({"ours_fused"})
    assert dense.plan.rounds == SUBJECTS["dense"].quick_rounds
    assert {one.name for one in dense.contenders} == {"by_hand", "again", "fused_by_hand", "ours_fused"}


def test_costs_are_paired_in_time_and_grouped_by_decade() -> None:
    slow, quick = [(1000, 2.0)] * 3, [(1000, 1.0)] * 3
    assert growth.by_decade([*slow, (90_000, 3.0)], [*quick, (90_000, 1.0)]) == {1e4: 2.0, 1e5: 3.0}


def test_a_variables_cost_is_the_difference_to_the_first_point() -> None:
    variables = growth.variables()
    cost = {10: 1.0, 100: 10.0, 1000: 100.0, 5000: 900.0}  # seconds for a step
    outcomes: dict[float, Outcome] = {}
    for x in growth.VARIABLES:
        names = [one.name for one in variables.contenders(x)]
        windows = {name: [[(1, cost[x])]] for name in names}
        outcomes[x] = Outcome(windows, {name: [cost[x]] for name in names}, {})
    section = growth.per_variable(variables.section(outcomes))
    row = section.row("ours_5000")
    assert row is not None and row.median == pytest.approx(1e6 * 899 / 4990)
    assert section.ratio("ours_5000", "ours_1000") == pytest.approx((899 / 4990) / (99 / 990))
    assert section.control == 0
