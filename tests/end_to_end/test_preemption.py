"""SIGTERM and Ctrl-C in every phase of a run: it saves, ends in time, and goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.stopped_experiment import stopped_at
from trainer_kit.checkpoints.names import complete_checkpoints
from trainer_kit.testing import Ended, ForkServer, compare_runs

EXPERIMENT = "tests.end_to_end.stopped_experiment"
TWO_CPUS = "runtime.virtual_cpus=2"
# Moments, and the step that a run has reached which is stopped there.
PHASES = {
    "compile": 0,
    "step 13": 14,
    "compile evaluation": 10,
    "evaluation": 10,
    "checkpoint.written": None,  # in the thread of the save: training goes on meanwhile
    "best.weights": 10,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([EXPERIMENT]) as running:
        yield running


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nothing stops, by their overrides."""
    folders = {}
    for overrides in ("", TWO_CPUS):
        folders[overrides] = tmp_path_factory.mktemp("whole") / "run"
        assert server.run("train", *_flags(folders[overrides], overrides)).code == 0
    return folders


def _flags(folder: Path, overrides: str = "") -> list[str]:
    given = [f"--params_override={overrides}"] if overrides else []
    flags = ["--experiment=stopped", "--mode=train_and_eval", f"--model_dir={folder}"]
    return [*flags, f"--import_module={EXPERIMENT}", *given]


def _stop(
    server: ForkServer, folder: Path, moment: str, number: int = signal.SIGTERM, signals: int = 1,
    seconds: float = 0.0, overrides: str = "",
) -> Ended:  # fmt: skip
    return server.run(stopped_at, moment, number, signals, seconds, *_flags(folder, overrides))


def _newest(folder: Path) -> int:
    return max(complete_checkpoints(str(folder)), default=0)


@pytest.mark.parametrize("overrides", ["", TWO_CPUS], ids=["one replica", "two"])
@pytest.mark.parametrize("moment", PHASES)
def test_sigterm_saves_what_was_done_and_the_next_start_goes_on_from_there(
    server: ForkServer, whole: dict[str, Path], tmp_path: Path, moment: str, overrides: str
) -> None:
    folder = tmp_path / "run"
    ended = _stop(server, folder, moment, overrides=overrides)
    assert ended.code == 75, ended.text
    told = re.search(r"stopped by SIGTERM at step (\d+)", ended.text)
    assert told is not None, ended.text
    assert int(told.group(1)) == _newest(folder)  # nothing is lost
    if PHASES[moment] is not None:
        assert _newest(folder) == PHASES[moment]
    again = server.run("train", *_flags(folder, overrides))
    assert again.code == 0, again.text
    assert compare_runs(whole[overrides], folder) == []


def test_ctrl_c_does_the_same_with_its_own_exit_code(server: ForkServer, tmp_path: Path) -> None:
    ended = _stop(server, tmp_path / "run", "step 13", signal.SIGINT)
    assert (ended.code, _newest(tmp_path / "run")) == (130, 14), ended.text


def test_a_second_ctrl_c_leaves_at_once_and_damages_nothing(
    server: ForkServer, whole: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended = _stop(server, folder, "checkpoint.written", signal.SIGINT, signals=2, seconds=60)
    assert ended.code == 130
    assert ended.seconds < 30
    assert server.run("train", *_flags(folder)).code == 0
    assert compare_runs(whole[""], folder) == []


def test_a_step_that_takes_too_long_is_not_waited_for(server: ForkServer, tmp_path: Path) -> None:
    grace = "trainer.preemption_grace_seconds=4,trainer.checkpoint_interval=10"
    ended = _stop(server, tmp_path / "run", "step 13", seconds=90, overrides=grace)
    assert ended.code == 75
    assert ended.seconds < 45
    assert "the steps after 10 are lost" in ended.text
    assert _newest(tmp_path / "run") == 10


def test_an_evaluation_that_takes_too_long_is_cut_and_the_steps_before_it_are_saved(
    server: ForkServer, tmp_path: Path
) -> None:
    ended = _stop(server, tmp_path / "run", "evaluation", seconds=90, overrides="trainer.preemption_grace_seconds=6")
    assert ended.code == 75
    assert ended.seconds < 45
    assert "stopped in the middle of an evaluation or a report; saved step 10" in ended.text
    assert _newest(tmp_path / "run") == 10
    record = json.loads((tmp_path / "run" / "ckpt-10.commit.json").read_text())
    assert set(record["files"]) == {"ckpt-10.index", "ckpt-10.data-00000-of-00001"}


@pytest.mark.parametrize(
    ("moment", "phase"), [("step 3", "train"), ("evaluation", "evaluate"), ("best.weights", "evaluate")]
)
def test_a_run_that_hangs_ends_with_its_own_exit_code_and_goes_on(
    server: ForkServer, whole: dict[str, Path], tmp_path: Path, moment: str, phase: str
) -> None:
    folder = tmp_path / "run"
    ended = _stop(server, folder, moment, signals=0, seconds=90, overrides="trainer.hang_timeout_seconds=8")
    assert ended.code == 7, ended.text
    assert f"no progress for 8 s in phase '{phase}'" in ended.text
    assert len(list(folder.glob("stacks-*.txt"))) == 1
    assert "happens" in next(folder.glob("stacks-*.txt")).read_text()
    assert server.run("train", *_flags(folder)).code == 0
    assert compare_runs(whole[""], folder) == []


def test_a_save_that_hangs_ends_the_run_too(server: ForkServer, tmp_path: Path) -> None:
    flags = "trainer.hang_timeout_seconds=8"
    ended = _stop(server, tmp_path / "run", "checkpoint.written", signals=0, seconds=90, overrides=flags)
    assert ended.code == 7, ended.text
    assert "in phase 'save'" in ended.text
