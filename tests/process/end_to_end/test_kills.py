"""A run that is killed anywhere, and started again, ends with the same bits as one that was not.

Real processes and real signals. All runs that the chosen tests need are started up front, two at a
time.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import read_json
from tests.fork_server import Ended, ForkServer
from tests.process.end_to_end.killed_experiment import (
    INTERVAL,
    STEPS,
    train_and_die_at,
    train_and_die_before_reports,
    train_and_record_points,
)
from trainer_kit.checkpoints.commit import describe_damage, read_commit_record
from trainer_kit.telemetry.goodput import read_goodput
from trainer_kit.testing import WRITE_POINTS, compare_runs

EXPERIMENT = "tests.process.end_to_end.killed_experiment"
SECONDS = 100.0  # the most that one run may take

AVERAGE = "--params_override=trainer.optimizer_config.ema.average_decay=0.9"
# What kills a run besides a write point.
LATE = "late"
TWO_SAVES = "two saves"
RANDOM = "random"


def _points(*names: str) -> tuple[str, ...]:
    return tuple(point for point in WRITE_POINTS if point.partition(".")[0] in names)


_LATER = _points("checkpoint", "final", "history", "best", "ledger")
# What one run is killed by, in this order, started again up to the next one, and at last to the
# end. The history is written anew only when there is something to take back: after a kill in the
# second save.
CHAINS: dict[str, tuple[str, ...]] = {
    "start": (*(point for point in WRITE_POINTS if point not in _LATER), RANDOM, RANDOM, RANDOM),
    "checkpoint": (*_points("checkpoint"), *_points("final")),
    "best": (LATE, TWO_SAVES, *_points("history"), *_points("best", "ledger")),
}
# The first of a checkpoint, or of the best, is cut when there is something to lose; two bests are
# written in turn.
OCCURRENCES = {"checkpoint.save": 2, "best.weights": 3}


@dataclass
class Story:
    """What has happened to one folder.

    Attributes:
      folder: of the run.
      causes: of the deaths, in order.
      deaths: of the processes that were killed.
      last: of the process that came to the end.
      best: after each death, what is wrong with the best checkpoint; "" if nothing is.
      steps: after each death, the last step in the history.
    """

    folder: Path
    causes: list[str] = field(default_factory=list)
    deaths: list[Ended] = field(default_factory=list)
    last: Ended | None = None
    best: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def note_death(self, cause: str, end: Ended) -> None:
        """Notes a death, and what is on the disk right after it."""
        self.causes.append(cause)
        self.deaths.append(end)
        folders = [self.folder / "best_ckpt", self.folder / "best_checkpoints" / "two"]
        self.best.append("; ".join(filter(None, map(_describe_wrong_best, folders))))
        lines = _complete_lines(self.folder / "metrics.jsonl")
        self.steps.append(max((line["step"] for line in lines), default=0))

    @property
    def starts(self) -> list[int | None]:
        """The step that each process went on from; None for one that did not come so far."""
        matches = [
            re.search(r"train_and_eval from step (\d+)", end.text)
            for end in (*self.deaths, self.last)
            if end
        ]
        return [int(match[1]) if match else None for match in matches]


Scenario = tuple[Callable[[ForkServer, Path, str], Story], str]


def run_uninterrupted(server: ForkServer, folder: Path, kind: str) -> Story:
    """A run that nothing happens to; it notes its write points."""
    notes = f"{folder}.points"
    arguments = _arguments(folder, kind)
    end = server.run(train_and_record_points, notes, *arguments, timeout=SECONDS)
    return Story(folder, last=end)


def kill_often(server: ForkServer, folder: Path, chain: str) -> Story:
    """SIGKILL by each cause of a chain in turn."""
    story = Story(folder)
    chance = random.Random("one seed")
    arguments = _arguments(folder)
    notes = f"{folder}.points"
    for cause in CHAINS[chain]:
        if cause == RANDOM:
            between = story.causes.count(RANDOM) % 2 == 0
            death = _kill_at_random(server, folder, chance, between)
        elif cause == LATE:
            death = server.run(train_and_die_before_reports, *arguments, timeout=SECONDS)
        else:
            point = "checkpoint.save" if cause == TWO_SAVES else cause
            occurrence = 2 if cause == TWO_SAVES else OCCURRENCES.get(cause, 1)
            death = server.run(
                train_and_die_at, point, occurrence, notes, *arguments, timeout=SECONDS
            )
        story.note_death(cause, death)
    story.last = server.run(train_and_record_points, notes, *arguments, timeout=SECONDS)
    return story


def _kill_at_random(
    server: ForkServer, folder: Path, chance: random.Random, between: bool
) -> Ended:
    """SIGKILL when a file has appeared, or between two of them."""
    child = server.start("train", *_arguments(folder))
    _wait_for_new_files(folder, chance.randrange(1, 20), lambda: child.alive)
    if between:  # counted from a file, since the length of a run depends on the machine
        time.sleep(chance.uniform(0.0, 0.1))
    child.kill()
    return child.wait(SECONDS)


def kill_fused_run(server: ForkServer, folder: Path, kind: str) -> Story:
    """SIGKILL in a save beside fused loops."""
    story = Story(folder)
    arguments = _arguments(folder, kind)
    death = server.run(
        train_and_die_at, "checkpoint.pointer", 2, f"{folder}.points", *arguments, timeout=SECONDS
    )
    story.note_death("checkpoint.pointer", death)

    story.last = server.run("train", *arguments, timeout=SECONDS)
    return story


def _all_scenarios(items: list[pytest.Item]) -> Iterator[Scenario]:
    """Those of the tests that were chosen, and the runs that they are compared with, which come
    first.
    """
    scenarios = [
        item.callspec.params["story"]
        for item in items
        if "story" in getattr(item, "fixturenames", ())
    ]
    yield from dict.fromkeys((run_uninterrupted, _kind(*scenario)) for scenario in scenarios)
    yield from dict.fromkeys(scenarios)


@pytest.fixture(scope="module")
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario, Any]]:
    """All scenarios, as futures."""
    base = tmp_path_factory.mktemp("kills")
    items = [item for item in request.session.items if item.path == request.path]
    with ForkServer([EXPERIMENT]) as server, ThreadPoolExecutor(2) as pool:
        futures: dict[Scenario, Future[Story]] = {}
        for number, (function, name) in enumerate(_all_scenarios(items)):
            folder = base / f"{number} {function.__name__} {name}"
            futures.setdefault((function, name), pool.submit(function, server, folder, name))
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def story(request: pytest.FixtureRequest, stories: dict[Scenario, Any]) -> Story:
    """What has happened in the scenario that the test asks for."""
    story: Story = stories[request.param].result(10 * SECONDS)
    assert story.last is not None
    assert story.last.code == 0, story.last.text
    return story


@pytest.fixture
def reference(request: pytest.FixtureRequest, stories: dict[Scenario, Any]) -> Path:
    """The folder of the uninterrupted run that the scenario has to equal."""
    scenario = request.node.callspec.params["story"]
    story: Story = stories[run_uninterrupted, _kind(*scenario)].result(10 * SECONDS)
    assert story.last is not None
    assert story.last.code == 0, story.last.text
    return story.folder


def _parametrize_story(function: Callable[..., Story], *names: str) -> Any:
    scenarios = [pytest.param((function, name), id=name) for name in names]
    return pytest.mark.parametrize("story", scenarios, indirect=True)


@_parametrize_story(kill_often, *CHAINS)
def test_a_run_that_was_killed_often_has_changed_no_bit(story: Story, reference: Path) -> None:
    assert compare_runs(reference, story.folder) == []


@pytest.mark.parametrize(
    ("story", "point"),
    [
        pytest.param((kill_often, chain), point, id=point)
        for chain, causes in CHAINS.items()
        for point in causes
        if point in WRITE_POINTS
    ],
    indirect=["story"],
)
def test_a_kill_at_a_write_point_leaves_a_whole_best(story: Story, point: str) -> None:
    number = story.causes.index(point)
    death = story.deaths[number]

    assert death.code == -signal.SIGKILL, death.text
    assert story.best[number] == ""


@_parametrize_story(kill_often, "start")
def test_kills_at_random_moments_lose_little(story: Story) -> None:
    first = story.causes.index(RANDOM)
    codes = [death.code for death in story.deaths[first:]]

    assert set(codes) <= {-signal.SIGKILL, 0}, codes
    assert codes.count(-signal.SIGKILL) >= 2, codes
    assert set(story.best[first:]) == {""}

    # Steps that were told and then taken again: an interval, and one more whose checkpoint was
    # still being written.
    pairs = zip(story.steps[first:], story.starts[first + 1 :], strict=True)
    repeated_steps = [step - start for step, start in pairs if start is not None]

    assert repeated_steps
    assert max(repeated_steps) <= 2 * INTERVAL, repeated_steps


@_parametrize_story(kill_often, "best")
def test_a_full_and_a_resumed_run_reach_exactly_all_write_points(
    story: Story, reference: Path
) -> None:
    points = {
        point
        for run in (reference, story.folder)
        for point in Path(f"{run}.points").read_text().split()
    }
    assert sorted(points) == sorted(WRITE_POINTS)


@_parametrize_story(kill_often, "best")
def test_the_history_is_as_new_as_an_unrecorded_checkpoint(story: Story) -> None:
    number = story.causes.index(LATE)
    assert story.deaths[number].code == -signal.SIGKILL, story.deaths[number].text
    assert story.starts[number : number + 2] == [0, INTERVAL]  # it is whole, and gone on from
    assert story.steps[number] >= INTERVAL


@_parametrize_story(kill_fused_run, "fused")
def test_a_kill_of_a_fused_run_changes_no_bit(story: Story, reference: Path) -> None:
    assert [death.code for death in story.deaths] == [-signal.SIGKILL]
    assert story.starts[1], story.starts  # it went on from a checkpoint
    assert compare_runs(reference, story.folder) == []


@_parametrize_story(kill_fused_run, "fused")
def test_the_goodput_counts_what_a_kill_has_cost(story: Story) -> None:
    goodput = read_goodput(story.folder)
    pairs = zip(story.steps, story.starts[1:], strict=True)
    repeated_steps = [max(0, step - (start or 0)) for step, start in pairs]

    assert goodput is not None
    assert goodput.attempts == 2
    assert goodput.steps == STEPS
    assert goodput.lost_steps == sum(repeated_steps)
    assert goodput.waiting_seconds > 0
    spent_seconds = goodput.training_seconds + goodput.lost_seconds + goodput.waiting_seconds
    # What was trained between the last heartbeat and the kill counts as a wait, too.
    assert 0 < spent_seconds < goodput.seconds + 5


def _kind(function: Callable[..., Story], name: str) -> str:
    return name if function in (run_uninterrupted, kill_fused_run) else "average"


def _arguments(folder: Path, kind: str = "average") -> list[str]:
    flags = [f"--import_module={EXPERIMENT}", "--mode=train_and_eval", f"--model_dir={folder}"]
    if kind == "fused":
        return [*flags, "--experiment=killed_fused"]
    return [*flags, "--experiment=killed", AVERAGE]


def _wait_for_new_files(folder: Path, count: int, alive: Callable[[], bool]) -> None:
    """Returns when `count` names that were not there before have appeared, or the run has ended."""
    before = _names(folder)
    new_names = set[str]()
    while len(new_names) < count and alive():
        new_names |= _names(folder) - before
        time.sleep(0.001)  # or the wait takes a core from the run


def _names(folder: Path) -> set[str]:
    return {
        os.path.join(place, name)
        for place, folders, names in os.walk(folder)
        for name in (*folders, *names)
    }


def _describe_wrong_best(folder: Path) -> str:
    """What info.json and the weights disagree in: "" if in nothing, or nothing was exported yet."""
    if not (folder / "info.json").exists():
        return ""
    info = read_json(folder / "info.json")
    prefix = str(folder / info["checkpoint"])
    if damage := describe_damage(prefix):
        return damage
    recorded_info = (read_commit_record(prefix) or {}).get("info")
    if recorded_info != info:
        return f"info.json has {info}, the record of the weights {recorded_info}"
    step = int(tf.train.load_variable(prefix, "global_step/.ATTRIBUTES/VARIABLE_VALUE"))
    if step != info["step"]:
        return f"info.json has step {info['step']}, the weights are of step {step}"
    return ""


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
