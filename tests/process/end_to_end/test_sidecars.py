"""Sidecars beside a trainer, both real processes, which are killed."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import json_lines, read_json, wait_until
from tests.engine.telemetry.test_tensorboard import read_curves
from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import (
    INTERVAL,
    train_and_die_at,
    train_and_hold_evaluation,
)
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.run.launcher import launch

EXPERIMENT = "tests.process.end_to_end.killed_experiment"


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
    return [*common, *(f"--params_override=trainer.{override}" for override in overrides)]


def _ledger(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / "evals/continuous_eval.jsonl")


def _metrics_by_place(path: Path) -> dict[tuple[int, str], Any]:
    """Returns the metrics of each evaluation in a ledger, by step and dataset."""
    return {(record["step"], record["dataset"]): record["metrics"] for record in json_lines(path)}


def test_killed_sidecars_of_a_killed_trainer_evaluate_all_once(
    server: ForkServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    notes = f"{run}.points"
    last_step = 9 * INTERVAL
    length = f"train_steps={last_step}"
    sidecar = _arguments(run, "continuous_eval", "continuous_eval_timeout=60", length)
    trainer = _arguments(run, "train", "max_to_keep=1", length)

    first_sidecar = server.start(train_and_die_at, "best.weights", 1, notes, *sidecar)
    wait_until(lambda: (run / "evals/continuous_eval.lease.json").exists(), 60)
    # Whole but for its record is the checkpoint of the third step in which it saves, and the next
    # trainer's third, too.
    deaths = [server.run(train_and_die_at, "checkpoint.written", 3, notes, *trainer)]
    deaths.append(first_sidecar.wait())
    deaths.append(server.run(train_and_die_at, "ledger.append", 1, notes, *sidecar))
    # The first step is evaluated; the sixth more is one of the third trainer's.
    late_sidecar = server.start(train_and_die_at, "ledger.append", 6, notes, *sidecar)
    deaths.append(server.run(train_and_die_at, "checkpoint.pointer", 3, notes, *trainer))
    assert late_sidecar.alive, late_sidecar.text
    last_trainer = server.run("train", *trainer)
    deaths.append(late_sidecar.wait())
    last_sidecar = server.run("train", *sidecar)

    for death in deaths:
        assert death.code == -signal.SIGKILL, death.text
    assert last_trainer.code == 0, last_trainer.text
    assert last_sidecar.code == 0, last_sidecar.text
    assert "continuous_eval finished; best accuracy " in last_sidecar.text

    records = _ledger(run)
    steps = list(range(INTERVAL, last_step + 1, INTERVAL))
    assert [record["step"] for record in records] == steps
    curves = read_curves(run / "evals/continuous_eval")
    assert [step for step, _ in curves["."]["accuracy"]] == steps
    # The first of equals.
    best = max(records, key=lambda record: float(record["metrics"]["accuracy"]))
    info = read_json(run / "evals/continuous_eval/best_ckpt/info.json")
    assert (info["step"], info["value"]) == (best["step"], best["metrics"]["accuracy"])
    weights = str(run / "evals/continuous_eval/best_ckpt" / info["checkpoint"])
    _, logs = launch(get_experiment("killed"), "eval", str(run), checkpoint=weights)
    assert logs["accuracy"] == pytest.approx(info["value"], abs=1e-6)


@pytest.fixture(scope="module")
def killed_run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after its first checkpoint."""
    run = tmp_path_factory.mktemp("killed") / "run"
    trainer = server.run(
        train_and_die_at, "checkpoint.save", 2, f"{run}.points", *_arguments(run, "train")
    )
    assert trainer.code == -signal.SIGKILL, trainer.text
    return run


def test_a_sidecar_of_a_killed_trainer_ends_and_names_its_step(
    server: ForkServer, killed_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed_run, tmp_path / "run")
    begin = time.monotonic()
    sidecar = server.run("train", *_arguments(run, "continuous_eval", "continuous_eval_timeout=2"))

    assert sidecar.code == 8, sidecar.text
    assert [record["step"] for record in _ledger(run)] == [5]
    last_line = sidecar.text.splitlines()[-1]
    message = r"no new checkpoint for 2 s .*ckpt-5 is the newest.*\(.* pid \d+\) is gone"
    assert re.search(message, last_line)
    assert time.monotonic() - begin < 60


def test_a_sidecar_ends_when_the_folder_of_its_run_is_moved(
    server: ForkServer, killed_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(killed_run, tmp_path / "run")
    sidecar = server.start(
        "train", *_arguments(run, "continuous_eval", "continuous_eval_timeout=60")
    )
    wait_until(lambda: (run / "evals/continuous_eval.jsonl").exists(), 60)

    run.rename(tmp_path / "moved")
    end = sidecar.wait()

    assert end.code == 6, end.text
    assert "/run was moved or removed during the run: " in end.text
    assert not run.exists()


def test_a_sidecar_in_an_evaluation_follows_a_restarted_run(
    server: ForkServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    held = tmp_path / "held"  # exists while the evaluation is held
    arguments = _arguments(run, "continuous_eval", "continuous_eval_timeout=20")
    sidecar = server.start(train_and_hold_evaluation, 2 * INTERVAL, str(held), *arguments)
    death = server.run(
        train_and_die_at, "checkpoint.pointer", 2, f"{run}.points", *_arguments(run, "train")
    )
    assert death.code == -signal.SIGKILL, death.text
    wait_until(held.exists, 60)

    restart = ["--from_step=0", "--allow_config_change=trainer.train_steps"]
    arguments = _arguments(run, "train", f"train_steps={2 * INTERVAL}")
    trainer = server.run("train", *arguments, *restart)
    assert trainer.code == 0, trainer.text
    held.unlink()
    end = sidecar.wait()

    assert end.code == 0, end.text
    new_steps = [
        record["step"] for record in _ledger(run) if record["lineage"] == 1 and "kind" not in record
    ]
    assert new_steps == [INTERVAL, 2 * INTERVAL]


def test_two_sidecars_share_three_validation_sets_of_one_run(
    server: ForkServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    datasets = ("dev", "hard", "seen")
    datasets_of_sidecars = {"first": ["dev", "hard"], "second": ["seen"]}
    metric = "best_checkpoint_eval_metric=dev|accuracy"
    data_flags = [
        *(
            f"--params_override=task.validation_data.{name}.global_batch_size=8"
            for name in datasets
        ),
        "--params_override=trainer.best_checkpoints.two=null,trainer.validation_sets.hard.steps=3",
    ]
    best_flags = [
        f"--params_override=trainer.best_checkpoints.{name}.metric={name}|accuracy"
        for name in datasets
    ]

    sidecars = []
    for sidecar_name, names in datasets_of_sidecars.items():
        choice = f"continuous_eval.validation_sets=[{','.join(names)}]"
        flags = _arguments(run, "continuous_eval", choice, metric)
        flags += [*data_flags, *best_flags, f"--eval_name={sidecar_name}"]
        sidecars.append(server.start("train", *flags))
    flags = _arguments(run, "train_and_eval", "train_steps=20", metric)
    trainer = server.run("train", *flags, *data_flags)

    assert trainer.code == 0, trainer.text
    for sidecar in sidecars:
        end = sidecar.wait()
        assert end.code == 0, end.text
        assert "no best checkpoint is kept by " in end.text

    trainer_metrics = _metrics_by_place(run / "evals/validation.jsonl")
    places = [(step, name) for step in (15, 20) for name in datasets]
    assert sorted(trainer_metrics) == sorted(places)
    for sidecar_name, names in datasets_of_sidecars.items():
        metrics = _metrics_by_place(run / f"evals/{sidecar_name}.jsonl")
        places = [(step, name) for step in (5, 10, 15, 20) for name in names]
        assert sorted(metrics) == sorted(places)
        for place in metrics.keys() & trainer_metrics.keys():
            assert metrics[place] == trainer_metrics[place]

        folder = run / "evals" / sidecar_name
        assert sorted(path.name for path in (folder / "best_checkpoints").iterdir()) == names
        assert (folder / "best_ckpt").exists() == (sidecar_name == "first")
        for name in names:
            accuracies = {step: metrics[step, name][name]["accuracy"] for step in (5, 10, 15, 20)}
            info = read_json(folder / "best_checkpoints" / name / "info.json")
            assert info["value"] == max(accuracies.values()) == accuracies[info["step"]]
