"""What a training step changes in addition to weights and optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.step_state import StepState


def test_it_says_whether_there_is_anything_new_to_save() -> None:
    task = SimpleNamespace(counter=tf.Variable(1.0))
    state = StepState({"task": task})

    assert state.add_attributes(set()) is True
    assert state.add_attributes(set()) is False

    task.other = tf.Variable(2.0)
    assert state.add_attributes(set()) is True
    assert list(state.variables) == ["task/counter", "task/other"]


def test_what_is_added_after_the_first_step_gets_its_value(tmp_path: Path) -> None:
    section = tf.Module()
    setattr(section, "task/made", tf.Variable(1.0))
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-1"))
    task: Any = SimpleNamespace()
    state = StepState({"task": task})
    state.restore(CheckpointGraph(path))
    state.end_restore(strict=False)
    task.made = tf.Variable(2.0)

    state.add_attributes(set())

    assert float(task.made) == 1.0


def test_another_shape_is_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = tf.Module()
    setattr(section, "task/made", tf.Variable([1.0]))
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-1"))
    state = StepState({"task": SimpleNamespace(made=tf.Variable(2.0))})
    state.allow_partial = True

    state.restore(CheckpointGraph(path))
    state.end_restore(strict=True)

    assert float(state.variables["task/made"]) == 2.0
    assert "contains task/made, which this run does not have in that shape" in caplog.text
