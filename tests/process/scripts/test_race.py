"""A race of real processes, which do nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.benchmarks.race import Contender, Plan, race
from tests.fork_server import ForkServer

RUNNERS = """
import threading
import time

def run(pacer, folder, seconds, loops=10**9):
    for _ in range(loops):
        time.sleep(seconds)
        pacer.done(5)
    raise ValueError(f"out of loops in {folder}")

def tick(pacer, folder):
    ticks, gained = [], 0
    threading.Thread(target=lambda: [(time.sleep(0.001), ticks.append(1)) for _ in range(10**5)], daemon=True).start()
    while True:
        before = len(ticks)
        pacer.done(1 + gained)
        gained = len(ticks) - before
"""


@pytest.fixture
def contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contender:
    (tmp_path / "runners.py").write_text(RUNNERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    return Contender(name="one", label="one", run="runners:run", options={"seconds": 0.01}, fresh=True)


def test_contenders_take_turns_and_a_failed_one_says_why(contender: Contender) -> None:
    broken = Contender(
        name="two", label="two", run=contender.run, options={"seconds": 0.0, "loops": 3}, fresh=True, to="one"
    )
    missing = Contender(name="three", label="three", run="nothing:run", needs=("nothing_like_it",), fresh=True)
    plan = Plan(rounds=2, windows=3, seconds=0.03, warm_up=0.01)
    outcome = race(ForkServer(), [contender, broken, missing], plan, "sleepers")
    assert [len(windows) for windows in outcome.windows["one"]] == [3, 3]
    assert all(count % 5 == 0 and seconds >= 0.03 for windows in outcome.windows["one"] for count, seconds in windows)
    assert len(outcome.starts["one"]) == 2
    assert list(outcome.failed) == ["two"] and "out of loops" in outcome.failed["two"]
    assert outcome.windows["two"] == [] == outcome.windows["three"]
    assert missing.absent == "nothing_like_it not installed"


def test_threads_of_waiting_contenders_stand_still(contender: Contender) -> None:
    ticking = Contender(name="two", label="two", run="runners:tick", fresh=True)
    slow = replace(contender, options={"seconds": 0.4})
    outcome = race(ForkServer(), [slow, ticking], Plan(rounds=1, windows=3, seconds=0.0, warm_up=0), "sleepers")
    assert outcome.failed == {}
    assert max(count for count, _ in outcome.windows["two"][0][1:]) < 100  # of up to 400; all get ready side by side


def test_a_race_is_over_when_all_have_come_far_enough(contender: Contender) -> None:
    outcome = race(ForkServer(), [contender], Plan(rounds=1, windows=99, seconds=0.0, warm_up=0, until=12), "sleepers")
    assert [count for count, _ in outcome.windows["one"][0]] == [5, 5, 5]
