"""Contenders that sleep; test_race.py lets them take turns."""

from __future__ import annotations

import threading
import time

from scripts.benchmarks.pacer import Pacer


def sleep(pacer: Pacer, folder: str, *, seconds: float, loops: int = 10**9) -> None:
    """Sleeps in each loop of five steps; fails after some loops."""
    for _ in range(loops):
        time.sleep(seconds)
        pacer.report_steps(5)
    raise ValueError("out of loops")


def tick(pacer: Pacer, folder: str) -> None:
    """Tells, as its figures, how often a thread ticks while the process waits for its turns."""
    ticks: list[int] = []

    def run_clock() -> None:
        while True:
            time.sleep(0.001)
            ticks.append(1)

    threading.Thread(target=run_clock, daemon=True).start()
    count = 0
    while True:
        before = len(ticks)
        pacer.report_figure(float(count))
        count = len(ticks) - before
