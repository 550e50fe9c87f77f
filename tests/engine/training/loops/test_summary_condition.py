"""In which steps a task's summaries are written, by an interval or by the clock."""

from __future__ import annotations

from fractions import Fraction

import tensorflow as tf

from trainer_kit.training.loops.train_loop import SummaryTimer, summary_condition


def _list_summary_steps(interval: int | Fraction, steps: int) -> list[int]:
    step = tf.Variable(0, dtype=tf.int64)
    condition = summary_condition(interval, step, steps)
    assert callable(condition)
    due = []
    for number in range(steps):
        step.assign(number)
        if condition():
            due.append(number)

    return due


def test_the_first_step_at_or_after_a_multiple_is_due() -> None:
    assert _list_summary_steps(10, 31) == [0, 10, 20, 30]
    assert _list_summary_steps(Fraction(103, 10), 43) == [0, 11, 21, 31, 42]
    assert summary_condition(None, tf.Variable(0), 5) is False


def test_by_the_clock_the_next_loop_writes_in_its_last_step() -> None:
    now = [0.0]
    step = tf.Variable(0, dtype=tf.int64)
    timer = SummaryTimer(60, lambda: now[0])
    recorded = []

    for begin, time in ((0, 1), (5, 61), (10, 62), (15, 130)):
        now[0] = time
        condition = summary_condition(timer, step, begin + 5)
        assert callable(condition)
        for number in range(begin, begin + 5):
            step.assign(number)
            if condition():
                recorded.append(number)

    assert recorded == [9, 19]
