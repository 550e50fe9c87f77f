"""What a controller evaluates on its way to its last step."""

from __future__ import annotations

import pytest

from trainer_kit.run.goal import Goal, data_ended_early

GOAL = Goal(eval_steps=-1, intervals={"far": None, "dev": 4, "test": 6}, saves_last=True)


@pytest.mark.parametrize(
    ("before", "step", "sets"),
    [(0, 3, []), (3, 5, ["dev"]), (5, 11, ["dev", "test"])],
)
def test_sets_are_due_at_multiples_of_their_intervals(before: int, step: int, sets: list[str]) -> None:
    assert GOAL.due(before, step, last=False, asked=()) == sets


def test_all_sets_are_due_at_the_last_step_wherever_it_is() -> None:
    assert GOAL.due(4, 5, last=True, asked=()) == ["far", "dev", "test"]


def test_a_set_that_was_asked_for_takes_its_place_in_the_order() -> None:
    assert GOAL.due(3, 5, last=False, asked=["test", "far"]) == ["far", "dev", "test"]


def test_without_intervals_nothing_is_due_even_if_asked_for() -> None:
    goal = Goal(eval_steps=-1, intervals={}, saves_last=False)
    assert goal.due(16, 20, last=True, asked=["dev"]) == []


def test_data_that_ended_early_names_both_steps() -> None:
    assert "task.train_data ended at step 5 of 20" in str(data_ended_early(5, 20))
