"""Experiments of several tasks from the command line, in each mode; test_processes.py has real
processes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.process.compat.model_garden.multitask.registered import BAD_BATCH
from trainer_kit import train
from trainer_kit.errors import ExitCode

REGISTERED = "tests.process.compat.model_garden.multitask.registered"

pytestmark = pytest.mark.usefixtures("data")


def command(kind: str, mode: str, folder: Path) -> int:
    """Runs to its end, in this process."""
    flags = (f"--import_module={REGISTERED}", f"--experiment=tfm/tiny_{kind}", f"--mode={mode}")
    return train.main(["train", *flags, f"--model_dir={folder}"])


def records(folder: Path, name: str) -> list[tuple[int, str]]:
    """Step and task of each evaluation on record."""
    lines = (folder / "evals" / f"{name}.jsonl").read_text().splitlines()
    return [
        (record["step"], task)
        for record in map(json.loads, lines)
        for task in record.get("metrics", ())
    ]


def final(folder: Path, names: list[str]) -> Any:
    """Asserts what a run tells at its end; returns its metrics by task."""
    told = json.loads((folder / "final.json").read_text())
    assert told["step"] == 50 and list(told["metrics"]) == names
    return told["metrics"]


def test_several_tasks_are_trained_and_evaluated_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["sum", "difference"]
    for mode in ("train_and_post_eval", "continuous_eval"):
        assert command("bad_joint", mode, tmp_path) == ExitCode.DONE
    assert re.search(rf"batch {BAD_BATCH}, of step \d+, is left out", caplog.text)
    assert (
        final(tmp_path, names)["difference"]["difference_error"] < 0.4
    )  # it has learnt from the others
    # The run went back to its start, which it had saved.
    assert records(tmp_path, "continuous_eval") == [
        (step, name) for step in (0, 30, 50) for name in names
    ]
    best = json.loads(
        (tmp_path / "evals" / "continuous_eval" / "best_ckpt" / "info.json").read_text()
    )
    assert set(names) < set(best)


def test_one_trained_task_is_evaluated_on_several_by_itself(tmp_path: Path) -> None:
    names = ["all", "some"]
    for mode in ("train_and_post_eval", "eval"):
        assert command("separate", mode, tmp_path) == ExitCode.DONE
    assert records(tmp_path, "eval") == [(50, name) for name in names]
    final(tmp_path, names)


def test_a_model_that_nobody_knows_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("modelless", "train", tmp_path) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert (
        "error: there is no model for the tasks: MultiTask has no method build_multitask_model()"
        in told
    )
    assert "Traceback" not in told
