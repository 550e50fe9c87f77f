"""Signals in every phase of a run: it saves, ends in time, and resumes as if never stopped."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.builders import read_json
from tests.fork_server import Ended, ForkServer
from tests.process.end_to_end.stopped_experiment import train_with_signals_at
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.testing import compare_runs

EXPERIMENT = "tests.process.end_to_end.stopped_experiment"
TWO_CPUS = (
    "runtime.virtual_cpus=2,runtime.distribution_strategy=mirrored,trainer.accumulate_steps=2,"
    "trainer.optimizer_config.ema.average_decay=0.9"
)
TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP
# By the overrides of a run: the moments in the order in which it is stopped at them, started again
# up to the next one, and at last to the end; and the step that it has reached.
PHASES: dict[str, dict[str, int | None]] = {
    "": {
        "compile": 0,
        "compile evaluation": 10,
        "step 13": 14,
        "best.weights": 20,  # at the end of the loop
        "step 23": 24,  # past the evaluation that is made up at the start
        "evaluation": 30,  # at the end of the loop, too
        "checkpoint.written": None,  # in the thread of the save: training goes on meanwhile
    },
    TWO_CPUS: {"compile": 0, "step 13": 14},
}
# What stops it there, if that is not SIGTERM, which decides the exit code when SIGINT comes too.
SIGNALS = {
    "compile evaluation": (HUP,),
    "step 13": (INT,),
    "step 23": (INT, TERM),
    "evaluation": (TERM, INT),
}
# Runs whose stop is a wait, for the end of a grace or of a patience: what happens when, and what
# they are given.
HANGS = {"signals": (), "seconds": 90, "overrides": "trainer.hang_timeout_seconds=8"}
LONG: dict[str, dict[str, Any]] = {
    "step": {
        "moment": "step 13",
        "seconds": 90,
        "overrides": "trainer.preemption_grace_seconds=4,trainer.checkpoint_interval=10",
    },
    "evaluation": {
        "moment": "evaluation",
        "seconds": 90,
        "overrides": "trainer.preemption_grace_seconds=6",
    },
    "hanging step": {"moment": "step 3", **HANGS},
    "hanging evaluation": {"moment": "evaluation", **HANGS},
    "hanging best": {"moment": "best.weights", **HANGS},
    "hanging save": {"moment": "checkpoint.pointer", **HANGS},
}
SECOND_CTRL_C = {"moment": "checkpoint.written", "signals": (INT,) * 2, "seconds": 60}
Stop = tuple[Path, Ended]  # the folder of a run, and how it was stopped


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([EXPERIMENT]) as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nothing stops, by their overrides."""
    folders = {}
    for overrides in ("", TWO_CPUS):
        folders[overrides] = tmp_path_factory.mktemp("whole") / "run"
        assert server.run("train", *_flags(folders[overrides], overrides)).code == 0
    return folders


@pytest.fixture(scope="module")
def stops(
    request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Stop]]]:
    """The long ones of the tests that were chosen, two at a time, while other tests run: most of
    each is a wait.
    """

    def stop(name: str) -> Stop:
        folder = tmp_path_factory.mktemp("stopped") / "run"
        return folder, _stop(server, folder, **LONG[name])

    names = [
        item.callspec.params.get("long")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(stop, name) for name in LONG if name in names}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def long(request: pytest.FixtureRequest, stops: dict[str, Future[Stop]]) -> Stop:
    """The run that the test is about."""
    return stops[request.param].result()


def _flags(folder: Path, overrides: str = "") -> list[str]:
    flags = [
        "--experiment=stopped",
        "--mode=train_and_eval",
        f"--model_dir={folder}",
        f"--import_module={EXPERIMENT}",
    ]
    if overrides:
        flags.append(f"--params_override={overrides}")
    return flags


def _stop(
    server: ForkServer,
    folder: Path,
    moment: str,
    signals: tuple[int, ...] = (TERM,),
    seconds: float = 0.0,
    overrides: str = "",
) -> Ended:
    return server.run(train_with_signals_at, moment, signals, seconds, *_flags(folder, overrides))


def _newest(folder: Path) -> int:
    return max(complete_checkpoints(str(folder)), default=0)


Often = tuple[Path, dict[str, tuple[Ended, int]], Ended]


@pytest.fixture(scope="module")
def stop_run_often(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory, stops: Any
) -> Callable[[str], Often]:
    """By its overrides: the folder of a run, how it ended at each moment with its newest checkpoint
    then, and at last.

    What takes long in other tests goes on meanwhile.
    """
    del stops

    @functools.cache
    def stop(overrides: str) -> Often:
        folder = tmp_path_factory.mktemp("often") / "run"
        ends = {}
        for moment in PHASES[overrides]:
            end = _stop(server, folder, moment, SIGNALS.get(moment, (TERM,)), overrides=overrides)
            ends[moment] = end, _newest(folder)
        return folder, ends, server.run("train", *_flags(folder, overrides))

    return stop


@pytest.mark.parametrize(
    ("overrides", "moment"),
    [(overrides, moment) for overrides, phases in PHASES.items() for moment in phases],
    ids=lambda value: {"": "one CPU", TWO_CPUS: "two CPUs"}.get(value, value),
)
def test_a_signal_saves_and_the_next_start_resumes_from_there(
    stop_run_often: Callable[[str], Often], overrides: str, moment: str
) -> None:
    _, ends, _ = stop_run_often(overrides)

    end, newest = ends[moment]
    signals = SIGNALS.get(moment, (TERM,))
    deciding_signal = TERM if TERM in signals else signals[0]
    assert end.code == (130 if deciding_signal == INT else 75), end.text
    assert "Traceback" not in end.text
    message = re.search(rf"stopped by {deciding_signal.name} at step (\d+)", end.text)
    assert message is not None, end.text
    assert int(message.group(1)) == newest  # nothing is lost
    assert PHASES[overrides][moment] in (newest, None)

    # Each start goes on from where the stop before it has saved.
    newest_steps = [0, *(step for _, step in ends.values())]
    start = newest_steps[list(ends).index(moment)]
    assert f"train_and_eval from step {start}" in end.text


@pytest.mark.parametrize("overrides", PHASES, ids=["one CPU", "two CPUs"])
def test_a_run_that_was_stopped_everywhere_keeps_the_same_bits(
    whole: dict[str, Path], stop_run_often: Callable[[str], Often], overrides: str
) -> None:
    folder, _, last = stop_run_often(overrides)
    assert last.code == 0, last.text
    assert compare_runs(whole[overrides], folder) == []


def test_a_run_that_is_still_being_built_ends_within_seconds(
    server: ForkServer, tmp_path: Path
) -> None:
    end = _stop(server, tmp_path / "run", "build", (INT, TERM), seconds=60)

    assert end.code == 75, end.text
    assert end.seconds < 30, end.text
    message = "stopped by SIGTERM before the first step; the same command starts the run again"
    assert message in end.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("long", ["step"], indirect=True)
def test_a_step_that_takes_too_long_is_not_waited_for(long: Stop) -> None:
    folder, end = long
    assert end.code == 75
    assert end.seconds < 45
    assert "the steps after 10 are lost" in end.text
    assert _newest(folder) == 10


@pytest.mark.parametrize("long", ["evaluation"], indirect=True)
def test_a_long_evaluation_is_cut_and_earlier_steps_are_saved(long: Stop) -> None:
    folder, end = long
    assert end.code == 75
    assert end.seconds < 45
    assert "stopped in the middle of an evaluation or a report; saved step 10" in end.text
    assert _newest(folder) == 10

    record = read_json(folder / "ckpt-10.commit.json")
    assert set(record["files"]) == {"ckpt-10.index", "ckpt-10.data-00000-of-00001"}


@pytest.mark.parametrize(
    ("long", "phase"),
    [("hanging step", "train"), ("hanging evaluation", "evaluate"), ("hanging best", "report")],
    indirect=["long"],
)
def test_a_run_that_hangs_ends_with_its_own_exit_code(long: Stop, phase: str) -> None:
    folder, end = long
    assert end.code == 7, end.text
    assert f"no progress for 8 s in phase '{phase}'" in end.text

    (stacks,) = folder.glob("stacks-*.txt")
    assert "reach_moment" in stacks.read_text()


@pytest.mark.parametrize("long", ["hanging best"], indirect=True)
def test_neither_a_hang_nor_a_second_ctrl_c_damages_a_run(
    server: ForkServer, whole: dict[str, Path], long: Stop
) -> None:
    folder, _ = long
    end = _stop(server, folder, **SECOND_CTRL_C)

    assert end.code == 130, end.text
    assert end.seconds < 30  # it leaves at once
    assert server.run("train", *_flags(folder)).code == 0
    assert compare_runs(whole[""], folder) == []


@pytest.mark.parametrize("long", ["hanging save"], indirect=True)
def test_a_save_that_hangs_ends_the_run_too(long: Stop) -> None:
    _, end = long
    assert end.code == 7, end.text
    assert "in phase 'save'" in end.text
