"""The metrics of an interrupted loop, in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.training.trainer_creation import create_trainer


class _OtherMetrics(LinearTask):
    def build_metrics(self, training: bool = True) -> list[Any]:
        return [keras.metrics.MeanSquaredError(), *super().build_metrics(training)]


def _create_trainer(task_type: type[LinearTask] = LinearTask) -> Any:
    config = linear_experiment()
    trainer = create_trainer(config, task_type(config.task), train=True, evaluate=False)
    trainer.initialize()
    return trainer


@pytest.fixture(scope="module")
def trained_trainer() -> Any:
    trainer = _create_trainer()
    trainer.train(tf.constant(3))
    return trainer


def _resume(
    trained_trainer: Any, interrupted: bool, folder: Path, task_type: type[LinearTask] = LinearTask
) -> Any:
    """A trainer that resumes from a checkpoint whose last loop was interrupted or not."""
    trained_trainer.should_continue_metrics = interrupted
    trained_trainer.before_save(str(folder / "ckpt"))
    path = trained_trainer.checkpoint.write(str(folder / "ckpt"))
    trainer = _create_trainer(task_type)
    trainer.should_continue_metrics = not interrupted
    trainer.checkpoint.read(path)
    trainer.after_restore(path)
    return trainer


def test_the_next_start_goes_on_with_their_values(
    trained_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = _resume(trained_trainer, True, tmp_path)

    assert resumed.should_continue_metrics
    assert float(trained_trainer.train_loss.result()) > 0
    np.testing.assert_array_equal(trained_trainer.train_loss.result(), resumed.train_loss.result())
    assert "other metrics" not in caplog.text


def test_a_whole_loop_leaves_nothing_to_restore(
    trained_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = _resume(trained_trainer, False, tmp_path)

    assert not resumed.should_continue_metrics
    assert float(resumed.train_loss.result()) == 0.0
    assert "other metrics" not in caplog.text


def test_other_metrics_begin_again_with_a_warning(
    trained_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = _resume(trained_trainer, True, tmp_path, _OtherMetrics)

    assert not resumed.should_continue_metrics
    assert float(resumed.train_loss.result()) == 0.0
    assert "holds the state of other metrics than this run has" in caplog.text
