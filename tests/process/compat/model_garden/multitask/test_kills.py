"""Several tasks that are killed and started again end with the same bits as those that were not. Real processes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.compat.model_garden.multitask.registered import BAD_BATCH, killed_at, stopped_in_step, trained
from trainer_kit.testing import Ended, ForkServer, compare_runs

EXPERIMENT = "tests.process.compat.model_garden.multitask.registered"
KINDS = ("joint", "interleaving")
SECONDS = 100.0
OFTEN = "trainer.train_steps=60,trainer.steps_per_loop=5,trainer.summary_interval=5,trainer.checkpoint_interval=10"


def arguments(data: str, kind: str, folder: Path, *overrides: str) -> list[str]:
    """The data, and the flags of a run."""
    common = [f"--import_module={EXPERIMENT}", f"--experiment=tfm/tiny_{kind}", "--mode=train_and_eval"]
    return [data, *common, f"--model_dir={folder}", *(f"--params_override={one}" for one in (OFTEN, *overrides))]


def run(server: ForkServer, function: Any, *given: Any) -> Ended:
    """Runs to its end."""
    return server.start(function, *given).wait(SECONDS)


@pytest.mark.parametrize(
    ("kind", "stop", "code", "start"),
    [
        ("joint", (killed_at, "checkpoint.pointer", 3), -signal.SIGKILL, 30),
        ("interleaving", (stopped_in_step, 43), 75, 43),  # in the middle of a loop
    ],
)
def test_a_kill_or_a_sigterm_and_another_start_change_no_bit(
    kind: str, stop: tuple[Any, ...], code: int, start: int, server: ForkServer, data: str, tmp_path: Path
) -> None:
    whole = server.start(trained, *arguments(data, kind, tmp_path / "whole"))
    again = arguments(data, kind, tmp_path / "again")
    ends = [run(server, *stop, *again), run(server, trained, *again)]
    assert whole.wait(SECONDS).code == 0, whole.text
    assert [end.code for end in ends] == [code, 0], ends[-1].text
    starts = [int(step) for end in ends for step in re.findall(r"train_and_eval from step (\d+)", end.text)]
    assert starts == [0, start]
    assert compare_runs(tmp_path / "whole", tmp_path / "again") == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_makes_one_task_diverge_is_left_out(
    kind: str, server: ForkServer, data: str, tmp_path: Path
) -> None:
    end = run(server, trained, *arguments(data, f"bad_{kind}", tmp_path / "run"))
    assert end.code == 0, end.text
    number = str(BAD_BATCH) if kind == "joint" else r"\d+"  # with interleaving, the batches of all tasks are counted
    assert re.search(rf"batch {number}, of step \d+, is left out", end.text), end.text
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert final["step"] == 60
    assert final["metrics"]["difference"]["difference_error"] < 0.4
