"""The steps that a run has traced, and when the trace is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.traces import times_traced
from trainer_kit.callbacks.base import Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.profile import Profile
from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.base_trainer import OwnParts
from trainer_kit.training.trainer_creation import create_trainer


@pytest.fixture(scope="module")
def trainer() -> Any:
    config = tiny_experiment()
    trainer = create_trainer(config, TinyTask(config.task), True, False, None)
    trainer.initialize()
    return trainer


def _listed(trainer: Any, folder: Path, window: str, chief: bool = True) -> CallbackList:
    trainer.global_step.assign(0)
    return CallbackList(Run(trainer, str(folder), chief), [Profile(window, str(folder))])


def _written(folder: Path) -> int:
    return len(list(folder.glob("plugins/profile/*/*.xplane.pb")))


def test_the_trace_is_written_after_the_last_of_its_steps(tmp_path: Path, trainer: Any) -> None:
    with _listed(trainer, tmp_path, "2:4").around("train"):
        trainer.train(tf.constant(3))
        assert _written(tmp_path) == 0
        trainer.train(tf.constant(3))
        assert _written(tmp_path) == 1
    assert times_traced(tmp_path, "SparseSoftmaxCrossEntropyWithLogits") == 3


def test_a_run_that_ends_inside_the_window_writes_its_trace(tmp_path: Path, trainer: Any) -> None:
    listed = _listed(trainer, tmp_path, "2:99")
    with pytest.raises(ZeroDivisionError), listed.around("train"):
        trainer.train(tf.constant(3))
        raise ZeroDivisionError
    assert _written(tmp_path) == 1
    trainer.train(tf.constant(3))  # of no run
    assert _written(tmp_path) == 1


def test_a_trainer_that_does_not_run_in_parts_is_refused(tmp_path: Path) -> None:
    other = SimpleNamespace(own=OwnParts(steps=True), global_step=tf.Variable(0, dtype=tf.int64))
    listed = CallbackList(Run(other, str(tmp_path)), [Profile("1:2", str(tmp_path))])
    with pytest.raises(UsageError), listed.around("train"):
        raise AssertionError
