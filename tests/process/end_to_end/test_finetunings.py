"""Fine-tunings beside a pretraining run, both real processes, which are killed and stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import wait_until
from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import killed_at, stopped_in_step
from trainer_kit.process.run_directory import count_starts
from trainer_kit.testing import compare_runs

EXPERIMENT = "tests.process.end_to_end.killed_experiment"
STEPS = (5, 10)  # of the pretraining run's checkpoints


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([EXPERIMENT]) as started:
        yield started


def _arguments(folder: Path, mode: str, *overrides: str) -> list[str]:
    common = [
        f"--import_module={EXPERIMENT}",
        "--experiment=killed",
        f"--model_dir={folder}",
        f"--mode={mode}",
    ]
    given = (f"trainer.train_steps={STEPS[-1]}", *overrides)
    return [*common, *(f"--params_override={override}" for override in given)]


def _pretraining(folder: Path) -> list[str]:
    return _arguments(folder, "train", "trainer.max_to_keep=1")


def _finetuning(folder: Path, pretraining: Path, *overrides: str) -> list[str]:
    given = (
        f"task.init_checkpoint={pretraining}",
        "trainer.continuous_eval_timeout=20",
        *overrides,
    )
    return _arguments(folder, "continuous_train_and_eval", *given)


def _metrics(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("metrics-*.json"))}


@pytest.fixture(scope="module")
def pretrained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pretraining run, and fine-tunings that were started before it and never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    beside = server.start("train", *_finetuning(folder / "beside", folder / "pretraining"))
    wait_until(lambda: (folder / "beside/heartbeat.json").exists(), 60)
    training = server.start("train", *_pretraining(folder / "pretraining"))
    assert training.wait().code == 0, training.text
    ended = beside.wait()
    assert ended.code == 0, ended.text
    return folder / "pretraining", folder / "beside"


def test_fine_tunings_take_every_checkpoint_of_a_live_run(pretrained: tuple[Path, Path]) -> None:
    pretraining, beside = pretrained
    assert sorted(_metrics(beside)) == sorted(f"metrics-{step}.json" for step in STEPS)
    assert [count_starts(beside / f"finetune-{step}") for step in STEPS] == [1, 1]
    lease = json.loads(next((pretraining / "evals").glob("finetune-*.lease.json")).read_text())
    assert (lease["ended"], lease["reads"]) == ("done", None)
    assert json.loads((beside / "final.json").read_text())["step"] == STEPS[-1]


def test_stopped_and_killed_fine_tunings_keep_the_same_bits(
    server: ForkServer, pretrained: tuple[Path, Path], tmp_path: Path
) -> None:
    pretraining, unkilled = pretrained
    run, notes, command = (
        tmp_path / "run",
        f"{tmp_path}.points",
        _finetuning(tmp_path / "run", pretraining),
    )
    first = server.run(killed_at, "checkpoint.save", 2, notes, *command)  # in the first fine-tuning
    for path in pretraining.glob(f"ckpt-{STEPS[0]}.*"):  # it goes on without its initial checkpoint
        path.unlink()
    stop = server.run(stopped_in_step, 12, *command)  # the seventh of the second fine-tuning
    assert stop.code == 75 and list(_metrics(run)) == [f"metrics-{STEPS[0]}.json"], stop.text
    deaths = [
        first,
        *(
            server.run(killed_at, point, 1, notes, *command)
            for point in ("best.weights", "final.rename")
        ),
    ]
    assert [death.code for death in deaths] == [-signal.SIGKILL] * 3, [
        death.text for death in deaths
    ]
    ended = server.run("train", *command)
    assert ended.code == 0, ended.text
    for step in STEPS:
        assert compare_runs(run / f"finetune-{step}", unkilled / f"finetune-{step}") == []
    assert _metrics(run) == _metrics(unkilled)


def test_sigterm_while_waiting_is_exit_75_and_leaves_nothing(
    server: ForkServer, tmp_path: Path
) -> None:
    command = _finetuning(tmp_path / "run", tmp_path / "pretraining")
    waiting = server.start("train", *command)
    wait_until(lambda: "waiting for" in waiting.text, 60)
    waiting.kill(signal.SIGTERM)
    ended = waiting.wait(20)
    assert ended.code == 75, ended.text
    assert "stopped by SIGTERM between two checkpoints" in ended.text
    assert not (tmp_path / "run").exists()
