"""A run that is killed anywhere, and started again, ends with the same bits as one that was not.

Real processes and real signals. All runs that the chosen tests need are started up front, two at a time.
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

from tests.process.end_to_end.killed_experiment import (
    INTERVAL,
    killed_at,
    killed_behind_its_reports,
    recorded,
    stopped_in_step,
)
from trainer_kit.checkpoints.commit import problem, read_record
from trainer_kit.testing import WRITE_POINTS, Ended, ForkServer, compare_runs

EXPERIMENT = "tests.process.end_to_end.killed_experiment"
SECONDS = 100.0  # the most that one run may take

AVERAGE = "trainer.optimizer_config.ema.average_decay=0.9"
KINDS = {
    "average": (AVERAGE,),
    "split batches on 2 CPUs": (
        *(AVERAGE, "trainer.accumulate_steps=2", "runtime.virtual_cpus=2", "runtime.distribution_strategy=mirrored"),
    ),
}

# Points in the order in which one run is killed at them, started again up to the next one, and at last to the end. The
# first of a checkpoint, or of the best, is cut at its second time, when there is something to lose.
CHAINS: dict[str, list[str]] = {"start": [], "checkpoint": [], "best": [], "history": [], "final": []}
for _point in WRITE_POINTS:
    _file = _point.partition(".")[0]
    CHAINS[_file if _file in CHAINS else {"ledger": "best"}.get(_file, "start")].append(_point)


@dataclass
class Story:
    """What has happened to one folder.

    Attributes:
      folder: of the run.
      deaths: of the processes that were stopped, in order.
      last: of the process that came to the end.
      best: after each death, what is wrong with the best checkpoint; "" if nothing is.
      steps: after each death, the last step in the history.
    """

    folder: Path
    deaths: list[Ended] = field(default_factory=list)
    last: Ended | None = None
    best: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def died(self, how: Ended) -> None:
        """Notes a death, and what is on the disk right after it."""
        self.deaths.append(how)
        folders = [self.folder / "best_ckpt", self.folder / "best_checkpoints" / "two"]
        self.best.append("; ".join(filter(None, map(_wrong_with_best, folders))))
        self.steps.append(max([0, *(line["step"] for line in _lines(self.folder / "metrics.jsonl"))]))

    @property
    def starts(self) -> list[int | None]:
        """The step that each process went on from; None for one that did not come so far."""
        found = [re.search(r"train_and_eval from step (\d+)", end.text) for end in (*self.deaths, self.last) if end]
        return [int(match[1]) if match else None for match in found]


Scenario = tuple[Callable[[ForkServer, Path, str], Story], str]


def uninterrupted(server: ForkServer, folder: Path, kind: str) -> Story:
    """A run that nothing happens to; it notes its write points."""
    return Story(folder, last=server.run(recorded, f"{folder}.points", *_arguments(folder, kind), timeout=SECONDS))


def stopped(server: ForkServer, folder: Path, kind: str) -> Story:
    """SIGTERM in the middle of a training loop."""
    story = Story(folder)
    story.died(server.run(stopped_in_step, 23, *_arguments(folder, kind), timeout=SECONDS))
    story.last = server.run("train", *_arguments(folder, kind), timeout=SECONDS)
    return story


def killed_at_points(server: ForkServer, folder: Path, chain: str) -> Story:
    """SIGKILL at each point of a chain in turn."""
    story = Story(folder)
    points = [(point, 1) for point in CHAINS[chain]]
    if chain in ("checkpoint", "best"):
        points[0] = (points[0][0], 2 if chain == "checkpoint" else 3)  # two bests are written in turn
    if chain == "history":  # which is written anew only when there is something to take back
        points.insert(0, ("checkpoint.save", 2))
    for point, occurrence in points:
        story.died(server.run(killed_at, point, occurrence, f"{folder}.points", *_arguments(folder), timeout=SECONDS))
    story.last = server.run(recorded, f"{folder}.points", *_arguments(folder), timeout=SECONDS)
    return story


def killed_at_random(server: ForkServer, folder: Path, seed: str) -> Story:
    """SIGKILL at three random moments, one of them the appearance of a new file."""
    story, chance = Story(folder), random.Random(seed)
    for number in range(3):
        child = server.start("train", *_arguments(folder))
        _wait_for_new_files(folder, chance.randrange(1, 20), lambda child=child: child.alive)
        if number % 2 == 0:  # between two files; counted from one, since the length of a run depends on the machine
            time.sleep(chance.uniform(0.0, 0.1))
        child.kill()
        story.died(child.wait(SECONDS))
    story.last = server.run("train", *_arguments(folder), timeout=SECONDS)
    return story


def killed_fused(server: ForkServer, folder: Path, kind: str) -> Story:
    """SIGKILL in a save beside fused loops, and right after the next file."""
    story, arguments = Story(folder), _arguments(folder, kind)
    story.died(server.run(killed_at, "checkpoint.pointer", 2, f"{folder}.points", *arguments, timeout=SECONDS))
    child = server.start("train", *arguments)
    _wait_for_new_files(folder, 3, lambda: child.alive)
    child.kill()
    story.died(child.wait(SECONDS))
    story.last = server.run("train", *arguments, timeout=SECONDS)
    return story


def killed_late(server: ForkServer, folder: Path, kind: str) -> Story:
    """SIGKILL when a checkpoint has all its files but its record, and the history is slow."""
    story = Story(folder)
    story.died(server.run(killed_behind_its_reports, *_arguments(folder, kind), timeout=SECONDS))
    story.last = server.run("train", *_arguments(folder, kind), timeout=SECONDS)
    return story


def _all_scenarios(items: list[pytest.Item]) -> Iterator[Scenario]:
    """Those of the tests that were chosen, and the runs that they are compared with, which come first."""
    found = [item.callspec.params["story"] for item in items if "story" in getattr(item, "fixturenames", ())]
    yield from dict.fromkeys((uninterrupted, _kind(*scenario)) for scenario in found)
    yield from dict.fromkeys(found)


@pytest.fixture(scope="module")
def stories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Any]]:
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
    found: Story = stories[request.param].result(10 * SECONDS)
    assert found.last is not None
    assert found.last.code == 0, found.last.text
    return found


@pytest.fixture
def reference(request: pytest.FixtureRequest, stories: dict[Scenario, Any]) -> Path:
    """The folder of the uninterrupted run that the scenario has to equal."""
    scenario = request.node.callspec.params["story"]
    found: Story = stories[uninterrupted, _kind(*scenario)].result(10 * SECONDS)
    assert found.last is not None
    assert found.last.code == 0, found.last.text
    return found.folder


def _of(function: Callable[..., Story], *names: str) -> Any:
    scenarios = [pytest.param((function, name), id=name) for name in names]
    return pytest.mark.parametrize("story", scenarios, indirect=True)


@_of(stopped, *KINDS)
def test_sigterm_in_a_loop_and_a_restart_change_no_bit(story: Story, reference: Path) -> None:
    death = story.deaths[0]
    assert death.code == 75, death.text
    stopped_at = re.search(r"stopped by SIGTERM at step (\d+)", death.text)
    assert stopped_at is not None, death.text
    step = int(stopped_at.group(1))
    assert step not in [line["step"] for line in _lines(reference / "metrics.jsonl")]  # no boundary of a loop
    assert story.starts == [0, step]
    assert compare_runs(reference, story.folder) == []


@_of(killed_at_random, "one seed")
def test_kills_at_random_moments_lose_little_and_change_no_bit(story: Story, reference: Path) -> None:
    codes = [death.code for death in story.deaths]
    assert set(codes) <= {-signal.SIGKILL, 0} and codes.count(-signal.SIGKILL) >= 2, codes
    assert set(story.best) == {""}
    # Steps that were told and then taken again: an interval, and one more whose checkpoint was still being written.
    redone = [step - start for step, start in zip(story.steps, story.starts[1:], strict=True) if start is not None]
    assert redone and max(redone) <= 2 * INTERVAL, redone
    assert compare_runs(reference, story.folder) == []


@pytest.mark.parametrize(
    ("story", "point"),
    [pytest.param((killed_at_points, chain), point, id=point) for chain, points in CHAINS.items() for point in points],
    indirect=["story"],
)
def test_a_kill_at_a_write_point_and_another_start_change_no_bit(story: Story, point: str, reference: Path) -> None:
    chain = next(points for points in CHAINS.values() if point in points)
    number = chain.index(point) + len(story.deaths) - len(chain)
    death = story.deaths[number]
    assert death.code == -signal.SIGKILL, death.text
    assert story.best[number] == ""
    assert compare_runs(reference, story.folder) == []


@_of(killed_at_points, "history")
def test_a_full_and_a_resumed_run_reach_exactly_all_write_points(story: Story, reference: Path) -> None:
    reached = {point for run in (reference, story.folder) for point in Path(f"{run}.points").read_text().split()}
    assert sorted(reached) == sorted(WRITE_POINTS)


@_of(killed_fused, "fused")
def test_two_kills_of_a_fused_run_change_no_bit(story: Story, reference: Path) -> None:
    assert [death.code for death in story.deaths] == [-signal.SIGKILL, -signal.SIGKILL]
    assert story.starts[1], story.starts  # it went on from a checkpoint
    assert compare_runs(reference, story.folder) == []


@_of(killed_late, "average")
def test_the_history_is_as_new_as_an_unrecorded_checkpoint(story: Story, reference: Path) -> None:
    assert story.deaths[0].code == -signal.SIGKILL, story.deaths[0].text
    assert story.starts == [0, INTERVAL]  # it is whole, and gone on from
    assert story.steps[0] >= INTERVAL
    assert compare_runs(reference, story.folder) == []


def _kind(function: Callable[..., Story], name: str) -> str:
    return name if function in (stopped, uninterrupted, killed_fused) else "average"


def _arguments(folder: Path, kind: str = "average") -> list[str]:
    experiment = "killed_fused" if kind == "fused" else "killed"
    common = [f"--import_module={EXPERIMENT}", f"--experiment={experiment}", "--mode=train_and_eval"]
    return [*common, f"--model_dir={folder}", *(f"--params_override={value}" for value in KINDS.get(kind, ()))]


def _wait_for_new_files(folder: Path, count: int, alive: Callable[[], bool]) -> None:
    """Returns when `count` names that were not there before have appeared, or the run has ended."""
    before, seen = _names(folder), set[str]()
    while len(seen) < count and alive():
        seen |= _names(folder) - before


def _names(folder: Path) -> set[str]:
    return {os.path.join(place, name) for place, folders, names in os.walk(folder) for name in (*folders, *names)}


def _wrong_with_best(folder: Path) -> str:
    """What info.json tells that the weights do not: "" if they agree, or nothing was exported yet."""
    if not (folder / "info.json").exists():
        return ""
    info = json.loads((folder / "info.json").read_text())
    prefix = str(folder / info["checkpoint"])
    if wrong := problem(prefix):
        return wrong
    if (noted := (read_record(prefix) or {}).get("info")) != info:
        return f"info.json tells {info}, the record of the weights {noted}"
    step = int(tf.train.load_variable(prefix, "global_step/.ATTRIBUTES/VARIABLE_VALUE"))
    return "" if step == info["step"] else f"info.json tells step {info['step']}, the weights are of step {step}"


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )
