"""Fine-tunings beside a pretraining run, both real processes, which are killed and stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import final_record, read_json, wait_until
from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import train_and_die_at, train_and_stop_in_step
from trainer_kit.process.run_directory import count_starts
from trainer_kit.testing import compare_runs

EXPERIMENT = "tests.process.end_to_end.killed_experiment"
STEPS = (5, 10)  # of the pretraining run's checkpoints


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([EXPERIMENT]) as fork_server:
        yield fork_server


def _arguments(folder: Path, mode: str, *overrides: str) -> list[str]:
    common = [
        f"--import_module={EXPERIMENT}",
        "--experiment=killed",
        f"--model_dir={folder}",
        f"--mode={mode}",
    ]
    all_overrides = (f"trainer.train_steps={STEPS[-1]}", *overrides)
    return [*common, *(f"--params_override={override}" for override in all_overrides)]


def _finetuning(folder: Path, pretraining: Path, *overrides: str) -> list[str]:
    return _arguments(
        folder,
        "continuous_train_and_eval",
        f"task.init_checkpoint={pretraining}",
        "trainer.continuous_eval_timeout=20",
        *overrides,
    )


def _metrics(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("metrics-*.json"))}


@pytest.fixture(scope="module")
def unkilled_runs(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A pretraining run, and fine-tunings that were started before it and never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    finetuning = server.start("train", *_finetuning(folder / "finetuning", folder / "pretraining"))
    wait_until(lambda: (folder / "finetuning/heartbeat.json").exists(), 60)
    command = _arguments(folder / "pretraining", "train", "trainer.max_to_keep=1")
    pretraining = server.run("train", *command)
    assert pretraining.code == 0, pretraining.text
    end = finetuning.wait()
    assert end.code == 0, end.text
    return folder / "pretraining", folder / "finetuning"


def test_fine_tunings_take_every_checkpoint_of_a_live_run(unkilled_runs: tuple[Path, Path]) -> None:
    pretraining, finetuning = unkilled_runs
    assert sorted(_metrics(finetuning)) == sorted(f"metrics-{step}.json" for step in STEPS)
    assert [count_starts(finetuning / f"finetune-{step}") for step in STEPS] == [1, 1]

    lease = read_json(next((pretraining / "evals").glob("finetune-*.lease.json")))
    assert lease["ended"] == "done"
    assert lease["reads"] is None
    assert final_record(finetuning)["step"] == STEPS[-1]


def test_stopped_and_killed_fine_tunings_keep_the_same_bits(
    server: ForkServer, unkilled_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    pretraining, unkilled = unkilled_runs
    run = tmp_path / "run"
    command = _finetuning(run, pretraining)

    def kill_at(point: str, occurrence: int) -> None:
        notes = f"{tmp_path}.points"
        death = server.run(train_and_die_at, point, occurrence, notes, *command)
        assert death.code == -signal.SIGKILL, death.text

    kill_at("checkpoint.save", 2)  # in the first fine-tuning
    for path in pretraining.glob(f"ckpt-{STEPS[0]}.*"):  # it goes on without its initial checkpoint
        path.unlink()
    stop = server.run(train_and_stop_in_step, 12, *command)  # the seventh of the second fine-tuning
    assert stop.code == 75, stop.text
    assert list(_metrics(run)) == [f"metrics-{STEPS[0]}.json"], stop.text
    kill_at("final.rename", 1)
    end = server.run("train", *command)

    assert end.code == 0, end.text
    for step in STEPS:
        assert compare_runs(run / f"finetune-{step}", unkilled / f"finetune-{step}") == []
    assert _metrics(run) == _metrics(unkilled)


def test_sigterm_while_waiting_is_exit_75_and_leaves_nothing(
    server: ForkServer, tmp_path: Path
) -> None:
    command = _finetuning(tmp_path / "run", tmp_path / "pretraining")
    child = server.start("train", *command)
    wait_until(lambda: "waiting for" in child.text, 60)

    child.kill(signal.SIGTERM)
    end = child.wait(20)

    assert end.code == 75, end.text
    assert "stopped by SIGTERM between two checkpoints" in end.text
    assert not (tmp_path / "run").exists()
