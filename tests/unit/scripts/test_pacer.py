"""A Pacer with both ends of its connection in one process, and a clock that the test moves."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from scripts.benchmarks.pacer import Pacer


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _started(*windows: tuple[float, float]) -> tuple[Pacer, Connection, _Clock]:
    """A Pacer that has told its first `done`, after two seconds, and is in the first of the windows."""
    (own, theirs), clock = Pipe(), _Clock()
    pacer = Pacer(theirs, clock)
    for window in windows:
        own.send(window)
    clock.now = 2.0
    pacer.done(100)
    assert own.recv() == 2.0
    return pacer, own, clock


def _run(pacer: Pacer, own: Connection, clock: _Clock, seconds: float) -> Any:
    """Loops of one step, so long each, until a window is told of."""
    while not own.poll():
        clock.now += seconds
        pacer.done(1)
    return own.recv()


def test_loops_that_begin_just_after_a_standstill_do_not_count() -> None:
    pacer, own, clock = _started((1.0, 0.5), (1.0, 0.5), (1.0, 0.5))
    for begin in (2.0, 63.5):
        assert _run(pacer, own, clock, 0.25) == (4, 1.0)
        assert clock.now == begin + 0.5 + 1.0
        clock.now += 60.0  # in `done`, while others run
        pacer._begin = pacer._went_on = pacer._loop_began = clock.now


@pytest.mark.parametrize("seconds", [0.5, 0.625, 4.0])
def test_the_first_loop_after_a_standstill_never_counts(seconds: float) -> None:
    pacer, own, clock = _started((0.5, 0.5), (0.5, 0.5))
    assert _run(pacer, own, clock, seconds) == (1, seconds)
    assert clock.now == 2.0 + 2 * seconds


def test_all_loops_count_where_none_are_to_settle() -> None:
    pacer, own, clock = _started((1.0, 0.0), (1.0, 0.0))
    assert _run(pacer, own, clock, 0.25) == (4, 1.0)
    assert clock.now == 3.0


def test_time_left_out_is_no_part_of_a_window() -> None:
    pacer, own, clock = _started((1.0, 0.5), (1.0, 0.5))
    clock.now += 5.0
    pacer.leave_out(5.0)
    assert _run(pacer, own, clock, 0.25) == (4, 1.0)
    assert clock.now == pytest.approx(2.0 + 5.0 + 0.5 + 1.0)
