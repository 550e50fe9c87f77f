"""Several tasks that are killed and started again end with the same bits as those that were not. Real processes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.process.compat.model_garden.multitask.registered import BAD_BATCH, killed_at, stopped_in_step, trained
from trainer_kit.errors import ExitCode
from trainer_kit.testing import Ended, ForkServer, compare_runs

EXPERIMENT = "tests.process.compat.model_garden.multitask.registered"
SECONDS = 100.0
OFTEN = "trainer.train_steps=60,trainer.steps_per_loop=5,trainer.summary_interval=5,trainer.checkpoint_interval=10"


def arguments(data: str, kind: str, folder: Path, *overrides: str) -> list[str]:
    """The data, and the flags of a run."""
    common = [f"--import_module={EXPERIMENT}", f"--experiment=tfm/tiny_{kind}", "--mode=train_and_eval"]
    return [data, *common, f"--model_dir={folder}", *(f"--params_override={one}" for one in (OFTEN, *overrides))]


def run(server: ForkServer, function: Any, *given: Any) -> Ended:
    """Runs to its end."""
    return server.start(function, *given).wait(SECONDS)


def left_out(kind: str, end: Ended, folder: Path) -> None:
    """Asserts that the spoilt batch of a run was left out, and that the run has learnt from the others."""
    number = str(BAD_BATCH) if kind == "joint" else r"\d+"  # with interleaving, the batches of all tasks are counted
    assert end.code == 0, end.text
    assert re.search(rf"batch {number}, of step \d+, is left out", end.text), end.text
    final = json.loads((folder / "final.json").read_text())
    assert final["step"] == 60
    assert final["metrics"]["difference"]["difference_error"] < 0.4


def test_a_kill_a_sigterm_and_other_starts_change_no_bit(server: ForkServer, data: str, tmp_path: Path) -> None:
    kind = "bad_interleaving"  # test_train_lib has a joint run that goes on
    whole = server.start(trained, *arguments(data, kind, tmp_path / "whole"))
    again = arguments(data, kind, tmp_path / "again")
    stops = (killed_at, "checkpoint.pointer", 4), (stopped_in_step, 13)  # of its own steps: in the middle of a loop
    ends = [run(server, *how, *again) for how in (*stops, (trained,))]
    left_out("interleaving", whole.wait(SECONDS), tmp_path / "whole")
    assert [end.code for end in ends] == [-signal.SIGKILL, ExitCode.PREEMPTED, 0], ends[-1].text
    starts = [int(step) for end in ends for step in re.findall(r"train_and_eval from step (\d+)", end.text)]
    assert starts == [0, 30, 43]
    assert compare_runs(tmp_path / "whole", tmp_path / "again") == []


def test_a_batch_that_makes_one_task_diverge_is_left_out(server: ForkServer, data: str, tmp_path: Path) -> None:
    left_out("joint", run(server, trained, *arguments(data, "bad_joint", tmp_path)), tmp_path)
