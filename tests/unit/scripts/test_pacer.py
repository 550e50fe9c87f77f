"""A Pacer with both ends of its connection in one process, and a clock that the test moves."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from scripts.benchmarks.pacer import SETTLES_WITHIN, Pacer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def start_pacer(*windows: float) -> tuple[Pacer, Connection, Clock]:
    """Returns a Pacer in the first of the windows, its other end, and its clock."""
    connection, theirs = Pipe()
    clock = Clock()
    pacer = Pacer(theirs, clock=clock)
    for seconds in windows:
        connection.send(seconds)
    pacer.report_steps(100)
    assert connection.recv() == "ready"
    return pacer, connection, clock


def run_window(pacer: Pacer, connection: Connection, clock: Clock, seconds: float) -> Any:
    """Runs loops of one step that take so long, until a window is reported."""
    while not connection.poll():
        clock.now += seconds
        pacer.report_steps(1)
    return connection.recv()


def test_loops_that_begin_just_after_a_standstill_do_not_count() -> None:
    pacer, connection, clock = start_pacer(1.0, 1.0)

    assert run_window(pacer, connection, clock, 0.25) == (4, 1.0)
    assert clock.now == 0.5 + 1.0


@pytest.mark.parametrize("seconds", [0.5, 0.625, 4.0])
def test_the_first_loop_after_a_standstill_never_counts(seconds: float) -> None:
    pacer, connection, clock = start_pacer(0.5, 0.5)

    assert seconds > SETTLES_WITHIN

    assert run_window(pacer, connection, clock, seconds) == (1, seconds)
    assert clock.now == 2 * seconds


def test_skipped_steps_come_before_the_process_is_ready() -> None:
    connection, theirs = Pipe()
    pacer = Pacer(theirs, skip=200)

    connection.send(0.0)

    pacer.report_steps(100)

    assert not connection.poll()

    pacer.report_steps(100)

    assert connection.recv() == "ready"
