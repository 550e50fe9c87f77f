"""How many functions of ours lie between the command line and a task's step, wrappers counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fork_server import ForkServer

MODULE = "tests.process.end_to_end.frames_experiment"


@pytest.mark.parametrize("mode", ["train_and_eval", "train"])
def test_few_frames_lie_between_main_and_a_tasks_step(mode: str, tmp_path: Path) -> None:
    flags = ["--experiment=frames", f"--mode={mode}", f"--model_dir={tmp_path / 'run'}"]
    with ForkServer([MODULE]) as server:
        end = server.run("train", f"--import_module={MODULE}", *flags)
    assert end.code == 0, end.text

    functions = [line.split()[2] for line in end.text.splitlines() if line.startswith("frame ")]
    assert "main" in functions, end.text
    trace = functions[functions.index("main") : functions.index("tf__train_step")]
    assert len(trace) <= 12, trace
