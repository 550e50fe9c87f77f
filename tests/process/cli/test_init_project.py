"""`trainer-kit init` makes projects. scripts/wheel.sh runs the test and the training of one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_new_project_has_an_experiment_a_config_and_a_test(
    trainer_kit: Command, here: Path
) -> None:
    done = trainer_kit("init", "my project")

    assert (done.returncode, done.stderr) == (0, "")
    assert "trainer-kit train --experiment=circle" in done.stdout
    project = here / "my project"
    files = sorted(str(path.relative_to(project)) for path in project.rglob("*") if path.is_file())
    assert files == [
        "README.md",
        "configs/short.yaml",
        "experiments/circle.py",
        "pytest.ini",
        "tests/test_circle.py",
    ]

    shown = trainer_kit("show", "circle", "--config_file=configs/short.yaml", folder=project)
    assert "train_steps = 100" in shown.stdout


def test_a_project_may_begin_with_a_shipped_package(trainer_kit: Command, here: Path) -> None:
    assert trainer_kit("init", "scans", "--experiment=digits").returncode == 0

    task = here / "scans" / "experiments" / "digits" / "config.py"
    task.write_text(task.read_text().replace("train_steps: int = 1200", "train_steps: int = 7"))
    shown = trainer_kit("show", "digits", "trainer.train_steps", folder=here / "scans")

    # It is the experiment of the project that is found.
    assert "trainer.train_steps = 7 " in shown.stdout, shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["old"], "error: FOLDER: old exists already; name a new one\n"),
        (["new", "--experiment=digit"], "'digit'; did you mean digits"),
    ],
)
def test_a_mistake_changes_nothing(
    trainer_kit: Command, here: Path, arguments: list[str], message: str
) -> None:
    (here / "old").mkdir()

    done = trainer_kit("init", *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["mine.py", "old"]
