"""A program of Tensorpack on the command line: training, overrides, and a sidecar."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer_kit
from tests.fork_server import ForkServer
from trainer_kit.errors import UsageError
from trainer_kit.train import main

PROGRAM = Path(__file__).parent / "programs" / "regression.py"


def run_command(mode: str, folder: str, *arguments: str) -> None:
    """Runs `python -m trainer_kit.train` for the program."""
    command = ["train", f"--import_module={PROGRAM}", "--experiment=tensorpack/regression"]
    sys.exit(main([*command, f"--mode={mode}", f"--model_dir={folder}", *arguments]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 of the program's 20 steps, continued to its end, and what a sidecar has added."""
    folder = tmp_path_factory.mktemp("run")
    with ForkServer(["trainer_kit.compat.tensorpack"]) as server:
        override = "--params_override=trainer.train_steps=10"
        half = server.run(run_command, "train_and_eval", str(folder), override)
        assert half.code == 0, half.text
        assert "finished at step 10" in half.text
        assert half.text.count("List of Trainable Variables") == 1
        change = "--allow_config_change=trainer.train_steps"
        end = server.run(run_command, "train_and_eval", str(folder), change)
        assert end.code == 0, end.text
        sidecar = server.run(run_command, "continuous_eval", str(folder))
        assert sidecar.code == 0, sidecar.text
        assert "this run does not have" not in sidecar.text
    return folder


def read_records(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """Returns the metrics of the evaluations, by step."""
    lines = (folder / "evals" / f"{name}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["metrics"] for record in records}


def test_a_run_continues_to_the_end_of_the_program(folder: Path) -> None:
    records = json.loads((folder / "stats.json").read_text())

    assert [record["epoch_num"] for record in records] == [1, 2, 3, 4]
    assert json.loads((folder / "final.json").read_text())["step"] == 20


def test_the_model_dir_has_all_files_of_the_program(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}

    assert {"stats.json", "min-validation_cost.index", "best_ckpt", "params.yaml"} <= names


def test_a_sidecar_evaluates_as_the_training_does(folder: Path) -> None:
    training = read_records(folder, "validation")
    sidecar = read_records(folder, "continuous_eval")

    assert 20 in sidecar.keys() & training.keys()
    for step in sidecar.keys() & training.keys():
        assert sidecar[step] == pytest.approx(training[step], rel=1e-6)


@pytest.mark.parametrize("use", ["load_model", "export", "predict"])
def test_a_run_is_used_by_the_names_of_its_tensors(folder: Path, use: str) -> None:
    message = r"use OfflinePredictor\(config\) or ModelExporter\(config\)\.export_"

    with pytest.raises(UsageError, match=message):
        getattr(trainer_kit, use)(folder, import_modules=str(PROGRAM))
