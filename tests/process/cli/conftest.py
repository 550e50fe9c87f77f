"""The real command, in a process of its own, in a folder with one experiment of a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
Command = Callable[..., subprocess.CompletedProcess[str]]

_FILE = '''
from trainer_kit import ExperimentConfig, TrainerConfig, register_experiment


@register_experiment("mine/small")
def small(steps: int = 5):
    """A small one.

    More about it.
    """
    return ExperimentConfig(trainer=TrainerConfig(train_steps=steps))


@register_experiment("mine/untold")
def untold():
    return ExperimentConfig()
'''


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with mine.py, which registers mine/small and mine/untold."""
    (tmp_path / "mine.py").write_text(_FILE)
    return tmp_path


@pytest.fixture
def trainer_kit(here: Path) -> Command:
    """Runs `trainer-kit ARGUMENTS` as a user does, in `here` unless `folder` is given."""

    def run(*arguments: str, folder: Path = here) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "trainer-kit"), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of 20 steps, evaluated at 10 and 20, and its sidecar `fast`; to be read, or copied, only."""
    from trainer_kit.run.launcher import launch
    from trainer_kit.testing import tiny_experiment

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    config = tiny_experiment(best_checkpoint_eval_metric="accuracy")
    launch(config, "train_and_eval", str(folder))
    launch(config, "continuous_eval", str(folder), eval_name="fast")
    return folder
