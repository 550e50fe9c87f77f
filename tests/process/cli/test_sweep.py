"""`trainer-kit sweep`: what it refuses before a trial starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.process.cli.conftest import Command
from trainer_kit.errors import ExitCode

METRIC = "--params_override=trainer.best_checkpoint_eval_metric=accuracy"
GRID = "--grid=trainer.train_steps=1,2"


@pytest.fixture
def with_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the verb find Optuna, which these mistakes do not need."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("with_optuna")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([METRIC], "error: give either --grid=PATH=V1,V2 or --optuna=FILE"),
        ([METRIC, GRID, "--optuna=a.yaml"], "error: give either --grid"),
        ([METRIC, "--grid=trainer.train_steps="], "=: give PATH=V1,V2, and each path once"),
        ([METRIC, GRID, GRID], "give PATH=V1,V2, and each path once"),
        ([METRIC, GRID, "--jobs=0"], "error: --jobs=0: give a number above 0"),
        ([METRIC, "--grid=trainer.train_step=1,2"], "did you mean trainer.train_steps"),
        ([METRIC, "--grid=trainer.train_steps=1,many"], "trainer.train_steps"),
        ([METRIC, "--grid=runtime.executor=default,single_threaded"], "trials of a sweep share a"),
        ([METRIC, "--optuna=none.yaml"], "error: none.yaml: there is no such file"),
        ([GRID], "error: a sweep needs a metric; set trainer.best"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, trainer_kit: Command) -> None:
    ended = trainer_kit(
        "sweep", "mine/small", "--import_module=mine.py", "--sweep_dir=sweep", *arguments
    )

    assert ended.returncode == ExitCode.USAGE
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_file_without_a_search_space_is_refused(
    with_optuna: None, trainer_kit: Command, here: Path
) -> None:
    (here / "sweep.yaml").write_text("trials: 3")

    ended = trainer_kit(
        "sweep", "mine/small", "--import_module=mine.py", "--sweep_dir=s", "--optuna=sweep.yaml"
    )

    assert "error: sweep.yaml: space is missing; give a range for each path" in ended.stderr


def test_a_missing_optuna_names_the_extra(
    trainer_kit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    ended = trainer_kit("sweep", "mine/small", "--sweep_dir=sweep", GRID)

    assert ended.returncode == ExitCode.USAGE
    message = "error: trainer-kit sweep needs Optuna: pip install 'tf-trainer-kit[sweep]'\n"
    assert ended.stderr == message
