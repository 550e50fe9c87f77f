"""The tiny experiments are what two runs can be compared by: the same data each time, and curves by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.compat.model_garden.garden_task import eagerly
from tests.engine.compat.model_garden.tiny.experiments import NAMES, tiny
from tests.engine.compat.model_garden.tiny.run_theirs import run_theirs


def _records(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tfrecord"))}


@pytest.mark.parametrize("name", NAMES)
def test_data_are_the_same_each_time(name: str, tmp_path: Path) -> None:
    """Two folders hold the same records."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        tiny(name).write(tmp_path / folder)
    assert _records(tmp_path / "one") == _records(tmp_path / "two")


@pytest.mark.parametrize("name", NAMES)
def test_config_is_short(name: str, tmp_path: Path) -> None:
    """50 steps, in loops as long as one says."""
    trainer = tiny(name).config(tmp_path, 5).trainer
    assert (trainer.train_steps, trainer.steps_per_loop, trainer.validation_interval) == (50, 5, 25)


def test_curves_are_read_back(tmp_path: Path) -> None:
    """The mock task's loss is its bias, which falls by 0.01 in each step; two steps end at an evaluation."""
    with eagerly():
        curves = run_theirs("mock", tmp_path / "data", tmp_path / "model", seed=1, steps_per_loop=10)
    assert list(curves["train"]) == [10, 20, 25, 35, 45, 50]
    assert curves["train"][10]["training_loss"] == pytest.approx(0.955)
    assert curves["validation"][50]["validation_loss"] == pytest.approx(0.5)
