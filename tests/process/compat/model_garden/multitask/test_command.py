"""Experiments of several tasks from the command line, in each mode. Real processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.compat.model_garden.multitask.registered import trained
from trainer_kit.errors import ExitCode
from trainer_kit.testing import Ended, ForkServer

EXPERIMENT = "tests.process.compat.model_garden.multitask.registered"


def command(server: ForkServer, data: str, kind: str, mode: str, folder: Path) -> Ended:
    """Runs to its end."""
    flags = (
        f"--import_module={EXPERIMENT}",
        f"--experiment=tfm/tiny_{kind}",
        f"--mode={mode}",
        f"--model_dir={folder}",
    )
    return server.start(trained, data, *flags).wait(100)


def records(folder: Path, name: str) -> list[tuple[int, str]]:
    """Step and task of each evaluation on record."""
    lines = (folder / "evals" / f"{name}.jsonl").read_text().splitlines()
    return [(record["step"], task) for record in map(json.loads, lines) for task in record["metrics"]]


def final(folder: Path, names: list[str]) -> None:
    """Asserts what a run tells at its end."""
    told = json.loads((folder / "final.json").read_text())
    assert told["step"] == 50 and list(told["metrics"]) == names


def test_several_tasks_are_trained_and_evaluated_beside_it(server: ForkServer, data: str, tmp_path: Path) -> None:
    names = ["sum", "difference"]
    for mode in ("train_and_post_eval", "continuous_eval"):
        end = command(server, data, "interleaving", mode, tmp_path)
        assert end.code == ExitCode.DONE, end.text
    assert records(tmp_path, "continuous_eval") == [(step, name) for step in (30, 50) for name in names]
    final(tmp_path, names)
    best = json.loads((tmp_path / "evals" / "continuous_eval" / "best_ckpt" / "info.json").read_text())
    assert set(names) < set(best)


def test_one_trained_task_is_evaluated_on_several_by_itself(server: ForkServer, data: str, tmp_path: Path) -> None:
    names = ["all", "some"]
    for mode in ("train_and_post_eval", "eval"):
        end = command(server, data, "separate", mode, tmp_path)
        assert end.code == ExitCode.DONE, end.text
    assert records(tmp_path, "eval") == [(50, name) for name in names]
    final(tmp_path, names)


def test_a_model_that_nobody_knows_is_told(server: ForkServer, data: str, tmp_path: Path) -> None:
    end = command(server, data, "modelless", "train", tmp_path)
    assert end.code == ExitCode.USAGE, end.text
    assert "error: there is no model for the tasks: MultiTask has no method build_multitask_model()" in end.text
    assert "Traceback" not in end.text
