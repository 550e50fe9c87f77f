"""The port in docs/from_model_garden.md: both programs and the command run, and go on with what the others began."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEPS = "--params_override=trainer.train_steps={}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files of the page."""
    folder, page = tmp_path_factory.mktemp("port"), (ROOT / "docs" / "from_model_garden.md").read_text()
    for name in ("rings.py", "before.py", "after.py"):
        text = page.split(f"<!-- example: {name} -->")[1].split("```python\n")[1].split("```")[0]
        (folder / name).write_text(text)
    return folder


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    flags = ("--experiment=rings", "--mode=train_and_eval", "--model_dir=run")
    return subprocess.run(
        [sys.executable, *command, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_run_that_their_program_began_is_gone_on_with_by_ours_by_the_command_and_by_theirs(folder: Path) -> None:
    for steps, command in (
        (200, ("before.py",)),
        (400, ("after.py",)),
        (600, ("-m", "trainer_kit.train", "--import_module=rings.py")),
        (800, ("before.py",)),
    ):
        done = _run(folder, *command, STEPS.format(steps))
        assert done.returncode == 0, done.stderr
        assert (folder / "run" / f"ckpt-{steps}.index").exists()
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == [300, 400, 500, 600]  # ours went on at 200
    assert set(json.loads((folder / "run" / "best_ckpt" / "info.json").read_text())) == {
        "accuracy",
        "validation_loss",
        "best_ckpt_global_step",
    }
