"""Experiments of several tasks from the command line, in each mode; test_processes.py has real
processes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.builders import final_record, json_lines, read_json
from tests.process.compat.model_garden.multitask.registered import BAD_BATCH
from trainer_kit import train
from trainer_kit.errors import ExitCode

REGISTERED = "tests.process.compat.model_garden.multitask.registered"

pytestmark = pytest.mark.usefixtures("data")


def run_command(kind: str, mode: str, folder: Path) -> int:
    """Runs to its end, in this process."""
    flags = (f"--import_module={REGISTERED}", f"--experiment=tfm/tiny_{kind}", f"--mode={mode}")
    return train.main(["train", *flags, f"--model_dir={folder}"])


def read_evaluations(folder: Path, name: str) -> list[tuple[int, str]]:
    """Step and task of each evaluation on record."""
    return [
        (record["step"], task)
        for record in json_lines(folder / "evals" / f"{name}.jsonl")
        for task in record.get("metrics", ())
    ]


def test_a_sidecar_evaluates_a_run_of_several_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["sum", "difference"]

    for mode in ("train_and_post_eval", "continuous_eval"):
        assert run_command("bad_joint", mode, tmp_path) == ExitCode.DONE

    assert re.search(rf"batch {BAD_BATCH}, of step \d+, is left out", caplog.text)
    record = final_record(tmp_path)
    assert record["step"] == 50
    assert list(record["metrics"]) == names
    # It has learnt from the other batches.
    assert record["metrics"]["difference"]["difference_error"] < 0.4
    # The run went back to its start, which it had saved.
    evaluations = [(step, name) for step in (0, 30, 50) for name in names]
    assert read_evaluations(tmp_path, "continuous_eval") == evaluations
    best = read_json(tmp_path / "evals" / "continuous_eval" / "best_ckpt" / "info.json")
    assert set(names) < set(best)


def test_one_trained_task_is_evaluated_on_several_by_itself(tmp_path: Path) -> None:
    names = ["all", "some"]

    for mode in ("train_and_post_eval", "eval"):
        assert run_command("separate", mode, tmp_path) == ExitCode.DONE

    assert read_evaluations(tmp_path, "eval") == [(50, name) for name in names]
    record = final_record(tmp_path)
    assert record["step"] == 50
    assert list(record["metrics"]) == names


def test_a_model_that_nobody_knows_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("modelless", "train", tmp_path) == ExitCode.USAGE

    error = capsys.readouterr().err
    message = "there is no model for the tasks: MultiTask has no method build_multitask_model()"
    assert f"error: {message}" in error
    assert "Traceback" not in error
