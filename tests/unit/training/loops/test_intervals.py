"""When things are due, without a model."""

from fractions import Fraction

import pytest

from trainer_kit.config.schema.durations import RoundedSteps, is_due
from trainer_kit.training.loops.intervals import loop_length, next_multiple, next_stop


def test_an_interval_is_due_when_a_loop_crosses_a_multiple_of_it() -> None:
    reached = [4, 8, 10, 14, 20]
    due = [
        step
        for before, step in zip([0, *reached], reached, strict=False)
        if is_due(before, step, 5)
    ]

    assert due == [8, 10, 20]


def test_events_of_a_resumed_run_fall_on_the_same_steps() -> None:
    straight = [step for step in range(1, 41) if is_due(step - 1, step, 7)]
    resumed = [step for step in range(18, 41) if is_due(step - 1, step, 7)]

    assert resumed == [step for step in straight if step >= 18]


def test_loops_of_four_up_to_ten_are_four_four_two() -> None:
    step = 0
    lengths = []

    while step < 10:
        lengths.append(loop_length(step, 10, 4))
        step += lengths[-1]

    assert lengths == [4, 4, 2]


def test_a_function_of_the_step_decides_the_length() -> None:
    assert loop_length(6, 100, lambda step: step + 1) == 7
    with pytest.raises(ValueError, match="returned 0 at step 6"):
        loop_length(6, 100, lambda step: 0)


def test_without_a_target_a_loop_is_never_cut() -> None:
    assert loop_length(10**6, None, 50) == 50


def test_training_pauses_at_multiples_and_at_the_end() -> None:
    stops = []
    step = 0

    while step < 10:
        step = next_stop(step, 10, 4)
        stops.append(step)

    assert stops == [4, 8, 10]
    assert next_stop(6, 10, 4) == 8
    assert next_stop(8, None, 4) == 12
    assert next_multiple(8, 4) == 12
    assert [next_stop(step, 10, 4, 3, None) for step in (0, 3, 4, 9)] == [3, 4, 6, 10]
    assert next_stop(3, None, None) is None


def test_a_fraction_of_steps_is_due_at_the_step_that_reaches_it() -> None:
    interval = RoundedSteps(Fraction(22, 5))
    step = 0
    stops = []

    while step < 22:
        step = next_stop(step, 22, interval)
        stops.append(step)

    assert stops == [5, 9, 14, 18, 22]
    assert [step for step in range(1, 23) if is_due(step - 1, step, interval)] == stops
