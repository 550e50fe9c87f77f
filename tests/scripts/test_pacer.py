"""A Pacer with both ends of its connection in one process."""

from __future__ import annotations

import time
from multiprocessing import Pipe

from scripts.benchmarks.pacer import SETTLES_WITHIN, Pacer


def test_loops_that_end_just_after_a_standstill_do_not_count() -> None:
    own, theirs = Pipe()
    pacer = Pacer(theirs)
    for wanted in (0.01, 0.01):
        own.send(wanted)
    begin, done = time.perf_counter(), 0
    pacer.done(100)
    assert own.recv() >= 0
    while not own.poll():
        time.sleep(0.02)
        pacer.done(1)
        done += 1
    count, seconds = own.recv()
    assert 0 < count < done
    assert seconds < SETTLES_WITHIN <= time.perf_counter() - begin
