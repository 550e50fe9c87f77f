"""A job goes on after SIGTERM with the bits of a job that was never stopped; tests of Keras have
kills.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.builders import read_json
from tests.fork_server import ForkServer
from tests.process.compat.pipelines.jobs import (
    STEPS,
    run_job,
    serve_without_trainer_kit,
    write_data,
)

SECOND_EPOCH = STEPS + 4
SECONDS = 120.0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folders of the jobs, and how the stopped one ended."""
    root = tmp_path_factory.mktemp("jobs")
    data = root / "data"
    whole = root / "whole"
    again = root / "again"
    for folder in (data, whole, again):
        folder.mkdir()
    write_data(data)
    with ForkServer() as server:
        stopped = server.run(run_job, data, again, SECOND_EPOCH, timeout=SECONDS)
        assert stopped.code == 75, stopped.text
        meta = read_json(again / "job" / "job_meta.json")
        ends = [
            server.run(run_job, data, again, timeout=SECONDS),
            server.run(run_job, data, whole, timeout=SECONDS),
        ]
        served = again / "artifacts" / "saved_model", root / "served.json"
        ends.append(server.run(serve_without_trainer_kit, *served, timeout=SECONDS))
        assert [end.code for end in ends] == [0] * 3, [end.text for end in ends]
    return {"whole": whole, "again": again, "stopped": stopped.text, "meta": meta, "root": root}


def test_a_job_goes_on_with_the_same_bits_after_sigterm(jobs: dict[str, Any]) -> None:
    whole = read_json(jobs["whole"] / "result-from-0.json")
    again = read_json(jobs["again"] / "result-from-1.json")
    assert again == whole
    assert again["epochs"] == [0, 1]  # early stopping waited one epoch, over the stop

    history = (jobs["again"] / "artifacts" / "history.csv").read_text()
    assert history == (jobs["whole"] / "artifacts" / "history.csv").read_text()
    assert len(history.splitlines()) == 1 + 2


def test_sigterm_in_an_epoch_ends_with_75_and_one_line(jobs: dict[str, Any]) -> None:
    output = jobs["stopped"]
    (step,) = re.findall(
        r"(?m)^stopped by SIGTERM at step (\d+); the same command resumes ", output
    )
    assert "Traceback" not in output

    assert SECOND_EPOCH <= int(step) < 2 * STEPS
    assert jobs["meta"] == {"last_epoch": 1, "last_checkpoint": f"checkpoints/ckpt-{step}"}


def test_saved_models_need_no_trainer_kit(jobs: dict[str, Any]) -> None:
    expected = read_json(jobs["again"] / "result-from-1.json")["output"]
    served = json.loads((jobs["root"] / "served.json").read_text())
    for row, expected_row in zip(served, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-6)
