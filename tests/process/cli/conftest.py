"""The command, in this process or in its own, in a folder with two experiments of a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import restore_registries
from trainer_kit.cli.main import main
from trainer_kit.config.experiment_registry import experiments

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
def trainer_kit(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs `trainer-kit ARGUMENTS` in this process, in `here` unless `folder` is given.

    It knows no experiments but those that it finds. What it has imported and registered is gone
    after the test.
    """

    def run(*arguments: str, folder: Path = here) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        try:
            code: int | str | None = main(arguments)
        except SystemExit as stop:  # of argparse
            code = stop.code
        return subprocess.CompletedProcess(arguments, int(code or 0), *capsys.readouterr())

    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    _forget_experiments(here)
    with restore_registries(experiments, empty=True):
        yield run
    _forget_experiments(here)
    sys.modules.update(modules)


def _forget_experiments(folder: Path) -> None:
    """Removes the modules that were imported from `folder`, and the package of the working
    directory's experiments.
    """
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        is_in_folder = isinstance(file, str) and file.startswith(f"{folder}{os.sep}")
        if "experiments" in name.split(".")[:2] or is_in_folder:
            del sys.modules[name]


@pytest.fixture
def process(here: Path) -> Command:
    """Runs `trainer-kit ARGUMENTS` as a user does, in `here`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "trainer-kit"), *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(here.parent),
        }
        return subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of 20 steps, evaluated at 10 and 20, and its sidecar `fast`; to be read, or
    copied, only.
    """
    from tests.engine.linear_task import linear_experiment
    from trainer_kit.run.launcher import launch

    folder = tmp_path_factory.mktemp("runs") / "small"
    config = linear_experiment(best_checkpoint_eval_metric="accuracy")
    launch(config, "train_and_eval", str(folder))
    launch(config, "continuous_eval", str(folder), eval_name="fast")
    return folder
