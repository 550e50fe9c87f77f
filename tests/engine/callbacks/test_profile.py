"""The steps that a run has traced, and when the trace is there."""

from __future__ import annotations

import logging
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


@pytest.mark.parametrize(
    ("window", "step", "reason"),
    [("4:6", 6, "the run resumes from step 6"), ("40:60", 0, "the run ended before step 40")],
)
def test_a_run_outside_the_window_says_that_nothing_is_traced(
    window: str, step: int, reason: str, tmp_path: Path, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    listed = _listed(trainer, tmp_path, window)
    trainer.global_step.assign(step)
    with listed.around("train"):
        trainer.train(tf.constant(3))
    assert _written(tmp_path) == 0
    assert caplog.messages == [f"profile={window}: no trace is written, since {reason}"]


def test_a_worker_that_is_not_the_chief_splits_its_loops_alike(tmp_path: Path, trainer: Any) -> None:
    with _listed(trainer, tmp_path, "1:2", chief=False).around("train"):
        assert trainer.loop_parts.window.cuts() == [0, 2]
        trainer.train(tf.constant(3))
    assert _written(tmp_path) == 0


def test_a_profiler_that_cannot_start_or_write_is_a_warning(
    tmp_path: Path, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    with _listed(trainer, tmp_path, "1:2").around("train"):
        trainer.train(tf.constant(3))
    tf.profiler.experimental.stop()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "plugins").touch()
    with _listed(trainer, tmp_path / "full", "1:2").around("train"):
        trainer.train(tf.constant(3))

    first, second = caplog.messages
    assert first == "no trace is written: Another profiler is running."
    assert f"the trace cannot be written in {tmp_path / 'full'}" in second


def test_a_trainer_that_does_not_run_in_parts_is_refused(tmp_path: Path) -> None:
    other = SimpleNamespace(own=OwnParts(steps=True), global_step=tf.Variable(0, dtype=tf.int64))
    listed = CallbackList(Run(other, str(tmp_path)), [Profile("1:2", str(tmp_path))])
    with pytest.raises(UsageError), listed.around("train"):
        raise AssertionError
