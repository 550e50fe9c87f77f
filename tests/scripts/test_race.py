"""A race of real processes, which do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks.race import Contender, Plan, race
from trainer_kit.testing import ForkServer

RUNNERS = """
import time

def run(pacer, folder, seconds, loops=10**9):
    for _ in range(loops):
        time.sleep(seconds)
        pacer.done(5)
    raise ValueError(f"out of loops in {folder}")
"""


@pytest.fixture
def contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contender:
    (tmp_path / "runners.py").write_text(RUNNERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return Contender(name="one", label="one", run="runners:run", options={"seconds": 0.01}, fresh=True)


def test_contenders_take_turns_and_one_that_fails_says_why_while_the_others_go_on(contender: Contender) -> None:
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


def test_a_race_is_over_when_all_have_come_far_enough(contender: Contender) -> None:
    outcome = race(ForkServer(), [contender], Plan(rounds=1, windows=99, seconds=0.0, warm_up=0, until=12), "sleepers")
    assert [count for count, _ in outcome.windows["one"][0]] == [5, 5, 5]
