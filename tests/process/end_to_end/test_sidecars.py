"""Sidecars beside a trainer, both real processes, which are killed."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import json_lines, read_json, wait_until
from tests.engine.telemetry.test_tensorboard import read_curves
from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import INTERVAL, held_in_evaluation, killed_at
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.run.launcher import launch

EXPERIMENT = "tests.process.end_to_end.killed_experiment"


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
    return [*common, *(f"--params_override=trainer.{override}" for override in overrides)]


def _ledger(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "evals/continuous_eval.jsonl").read_text().splitlines()
    ]


def test_killed_sidecars_of_a_killed_trainer_evaluate_all_once(
    server: ForkServer, tmp_path: Path
) -> None:
    run, steps = tmp_path / "run", 9 * INTERVAL
    of_run = f"train_steps={steps}"
    sidecar = _arguments(run, "continuous_eval", "continuous_eval_timeout=60", of_run)
    trainer = _arguments(run, "train", "max_to_keep=1", of_run)
    first = server.start(killed_at, "best.weights", 1, f"{run}.points", *sidecar)
    wait_until(lambda: (run / "evals/continuous_eval.lease.json").exists(), 60)
    # Whole but for its record is the checkpoint of the third step in which it saves, and the next
    # trainer's third, too.
    trained = [server.run(killed_at, "checkpoint.written", 3, f"{run}.points", *trainer)]
    deaths = [first.wait()]
    for point in ("best.info.rename", "ledger.append"):
        deaths.append(server.run(killed_at, point, 1, f"{run}.points", *sidecar))
    # The first step is evaluated; the sixth more is one of the third trainer's.
    beside = server.start(killed_at, "ledger.append", 6, f"{run}.points", *sidecar)
    trained.append(server.run(killed_at, "checkpoint.pointer", 3, f"{run}.points", *trainer))
    assert beside.alive, beside.text
    ended = server.run("train", *trainer)
    deaths.append(beside.wait())
    last = server.run("train", *sidecar)
    assert [death.code for death in trained] == [-signal.SIGKILL] * 2, [
        death.text for death in trained
    ]
    assert ended.code == 0, ended.text
    assert [death.code for death in deaths] == [-signal.SIGKILL] * 4, [
        death.text for death in deaths
    ]
    assert last.code == 0, last.text
    assert "continuous_eval finished; best accuracy " in last.text

    records, every = _ledger(run), list(range(INTERVAL, steps + 1, INTERVAL))
    assert [record["step"] for record in records] == every
    curves = read_curves(run / "evals/continuous_eval")
    assert [step for step, _ in curves["."]["accuracy"]] == every
    best = max(
        records, key=lambda record: float(record["metrics"]["accuracy"])
    )  # the first of equals
    info = json.loads((run / "evals/continuous_eval/best_ckpt/info.json").read_text())
    assert (info["step"], info["value"]) == (best["step"], best["metrics"]["accuracy"])
    weights = str(run / "evals/continuous_eval/best_ckpt" / info["checkpoint"])
    _, logs = launch(get_experiment("killed"), "eval", str(run), checkpoint=weights)
    assert logs["accuracy"] == pytest.approx(info["value"], abs=1e-6)


def test_a_sidecar_of_a_killed_trainer_ends_and_names_its_step(
    server: ForkServer, tmp_path: Path
) -> None:
    trainer = server.run(
        killed_at, "checkpoint.save", 2, f"{tmp_path}.points", *_arguments(tmp_path, "train")
    )
    assert trainer.code == -signal.SIGKILL
    begin = time.monotonic()
    sidecar = server.run(
        "train", *_arguments(tmp_path, "continuous_eval", "continuous_eval_timeout=2")
    )
    assert sidecar.code == 8, sidecar.text
    assert [record["step"] for record in _ledger(tmp_path)] == [5]
    told = sidecar.text.splitlines()[-1]
    assert re.search(
        r"no new checkpoint for 2 s .*newest checkpoint, ckpt-5, .*\(.* pid \d+\) is gone", told
    )
    assert time.monotonic() - begin < 60


def test_a_sidecar_ends_when_the_folder_of_its_run_is_moved(
    server: ForkServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trainer = server.run(
        killed_at, "checkpoint.save", 2, f"{run}.points", *_arguments(run, "train")
    )
    assert trainer.code == -signal.SIGKILL
    sidecar = server.start(
        "train", *_arguments(run, "continuous_eval", "continuous_eval_timeout=60")
    )
    wait_until(lambda: (run / "evals/continuous_eval.jsonl").exists(), 60)
    run.rename(tmp_path / "moved")
    ended = sidecar.wait()
    assert ended.code == 6, ended.text
    assert "/run was moved or removed during the run: " in ended.text
    assert not run.exists()


def test_a_sidecar_in_an_evaluation_follows_a_restarted_run(
    server: ForkServer, tmp_path: Path
) -> None:
    held, run = tmp_path / "held", tmp_path / "run"
    sidecar = _arguments(run, "continuous_eval", "continuous_eval_timeout=20")
    side = server.start(held_in_evaluation, 2 * INTERVAL, str(held), *sidecar)
    death = server.run(
        killed_at, "checkpoint.pointer", 2, f"{run}.points", *_arguments(run, "train")
    )
    assert death.code == -signal.SIGKILL, death.text
    wait_until(held.exists, 60)
    again = ["--from_step=0", "--allow_config_change=trainer.train_steps"]
    trained = server.run("train", *_arguments(run, "train", f"train_steps={2 * INTERVAL}"), *again)
    assert trained.code == 0, trained.text
    held.unlink()
    ended = side.wait()
    assert ended.code == 0, ended.text
    new = [
        record["step"] for record in _ledger(run) if record["lineage"] == 1 and "kind" not in record
    ]
    assert new == [INTERVAL, 2 * INTERVAL]


def test_two_sidecars_share_three_validation_sets_of_one_run(
    server: ForkServer, tmp_path: Path
) -> None:
    run, of_names = tmp_path / "run", {"one": ["dev", "hard"], "other": ["seen"]}
    names = ("dev", "hard", "seen")
    sets = [f"--params_override=task.validation_data.{name}.global_batch_size=8" for name in names]
    sets += [
        "--params_override=trainer.best_checkpoints.two=null,trainer.validation_sets.hard.steps=3"
    ]
    best = [
        f"--params_override=trainer.best_checkpoints.{name}.metric={name}|accuracy"
        for name in names
    ]
    metric = "best_checkpoint_eval_metric=dev|accuracy"
    sidecars = []
    for name, chosen in of_names.items():
        choice = f"continuous_eval.validation_sets=[{','.join(chosen)}]"
        flags = _arguments(run, "continuous_eval", choice, metric)
        sidecars.append(server.start("train", *flags, *sets, *best, f"--eval_name={name}"))
    assert (
        server.run(
            "train", *_arguments(run, "train_and_eval", "train_steps=20", metric), *sets
        ).code
        == 0
    )
    for sidecar in sidecars:
        ended = sidecar.wait()
        assert ended.code == 0, ended.text
        assert "no best checkpoint is kept by " in ended.text

    own = {
        (record["step"], record["dataset"]): record["metrics"]
        for record in json_lines(run / "evals/validation.jsonl")
    }
    assert sorted(own) == sorted((step, name) for step in (15, 20) for name in names)
    for name, chosen in of_names.items():
        records = json_lines(run / f"evals/{name}.jsonl")
        metrics = {(record["step"], record["dataset"]): record["metrics"] for record in records}
        assert sorted(metrics) == sorted(
            (step, data) for step in (5, 10, 15, 20) for data in chosen
        )
        assert all(metrics[place] == own[place] for place in metrics.keys() & own.keys())
        assert (
            sorted(path.name for path in (run / f"evals/{name}/best_checkpoints").iterdir())
            == chosen
        )
        assert (run / f"evals/{name}/best_ckpt").exists() == (name == "one")
        for data in chosen:
            accuracies = {step: metrics[step, data][data]["accuracy"] for step in (5, 10, 15, 20)}
            info = read_json(run / f"evals/{name}/best_checkpoints/{data}/info.json")
            assert info["value"] == max(accuracies.values()) == accuracies[info["step"]]
