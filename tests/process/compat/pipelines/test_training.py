"""Jobs of both generations go on after kill -9 and SIGTERM, with the bits of a job that was never stopped."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.process.compat.pipelines.jobs import (
    STEPS,
    run_first,
    run_second,
    run_to_the_end,
    serve_without_trainer_kit,
    write_records,
)

SECOND_EPOCH = STEPS + 4
SECONDS = 120.0


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folders of the jobs, how the stopped one ended, and the files before and after a third start."""
    root = tmp_path_factory.mktemp("jobs")
    data, names = root / "data", ("whole_1", "again_1", "whole_2", "again_2")
    folders = {name: root / name for name in names}
    for folder in (data, *folders.values()):
        folder.mkdir()
    write_records(data)
    with ForkServer() as server:
        killed = server.run(run_first, data, folders["again_1"], SECOND_EPOCH, timeout=SECONDS)
        assert killed.code == -signal.SIGKILL, killed.text
        stopped = server.run(run_second, data, folders["again_2"], SECOND_EPOCH, timeout=SECONDS)
        assert stopped.code == 75, stopped.text
        meta = json.loads((folders["again_2"] / "job" / "job_meta.json").read_text())
        models = [folders[name] / "artifacts" / "saved_model" for name in ("again_1", "again_2")]
        for run in ((run_to_the_end, data, root), (serve_without_trainer_kit, *models, root / "served.json")):
            end = server.run(*run, timeout=SECONDS)
            assert end.code == 0, end.text
    found = {name: json.loads((root / f"{name}.json").read_text()) for name in ("found", "before", "after", "served")}
    return {**folders, "stopped": stopped, "meta": meta, **found}


def test_a_job_goes_on_with_the_same_bits_after_a_kill(jobs: dict[str, Any]) -> None:
    whole, again = result(jobs["whole_1"]), jobs["found"]
    assert (whole.pop("begun"), again.pop("begun")) == (0, 1)
    assert again == whole
    assert (again["last_epoch"], again["epochs"]) == (3, [0, 1, 2])
    assert again["history"]["learning_rate"] == pytest.approx([0.01, 0.01, 0.001])


@pytest.mark.parametrize("form", [1, 2])
def test_history_csv_has_all_epochs_after_a_restart(jobs: dict[str, Any], form: int) -> None:
    texts = [(jobs[f"{kind}_{form}"] / "artifacts" / "history.csv").read_text() for kind in ("whole", "again")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 1 + len(result(jobs[f"whole_{form}"])["epochs"])


def test_another_start_of_a_finished_job_writes_no_artifacts(jobs: dict[str, Any]) -> None:
    assert jobs["after"] == jobs["before"]
    third = result(jobs["again_1"])
    assert third["begun"] == 3
    assert {name: third[name] for name in ("weights", "history")} == {
        name: jobs["found"][name] for name in ("weights", "history")
    }


def test_sigterm_in_an_epoch_ends_with_75_and_one_line(jobs: dict[str, Any]) -> None:
    errors = [line for line in jobs["stopped"].text.splitlines() if line.startswith(("error", "Traceback"))]
    (step,) = re.findall(r"^error: stopped by SIGTERM at step (\d+); the same command resumes ", errors[0])
    assert len(errors) == 1
    assert SECOND_EPOCH <= int(step) < 2 * STEPS
    assert jobs["meta"] == {"last_epoch": 1, "last_checkpoint": f"checkpoints/ckpt-{step}"}


def test_patience_and_rates_are_counted_over_sigterm(jobs: dict[str, Any]) -> None:
    whole, again = result(jobs["whole_2"]), result(jobs["again_2"])
    assert (whole.pop("begun"), again.pop("begun")) == (0, 1)
    assert again == whole
    assert again["epochs"] == [0, 1]  # early stopping waited one epoch


def test_saved_models_need_no_trainer_kit(jobs: dict[str, Any]) -> None:
    for output, name in zip(jobs["served"], ("again_1", "again_2"), strict=True):
        for row, expected in zip(output, result(jobs[name])["output"], strict=True):
            assert row == pytest.approx(expected, abs=1e-6)
