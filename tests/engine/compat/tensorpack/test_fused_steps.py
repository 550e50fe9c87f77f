"""Fused steps: the same training, with several steps in one XLA program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.tfutils.summary import add_moving_summary

from trainer_kit.compat.tensorpack import (
    Callback,
    DataFlow,
    FullyConnected,
    ModelDesc,
    ModelSaver,
    ScheduledHyperParamSetter,
    SimpleTrainer,
    TrainConfig,
    launch_train_with_config,
    logger,
)
from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.compat.tensorpack.fused_steps import FusedSteps
from trainer_kit.errors import UsageError


class Points(DataFlow):
    """Batches of points, and one that is smaller."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        for index in range(7):
            size = 3 if index == 1 else 4
            yield [np.arange(size * 2, dtype=np.float32).reshape(size, 2) / (index + 3)]

    def __len__(self) -> int:
        return 7


class Model(ModelDesc):
    """A linear layer with momentum."""

    def inputs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([None, 2], tf.float32, "points")]

    def build_graph(self, points: tf.Tensor) -> tf.Tensor:
        outputs = FullyConnected("linear", points, 1)
        cost = tf.reduce_mean(tf.square(outputs - 1.0), name="cost")
        add_moving_summary(cost)
        return cost

    def optimizer(self) -> object:
        rate = tf.get_variable("learning_rate", initializer=0.01, trainable=False)
        return tf.train.MomentumOptimizer(rate, 0.9)


class EachStep(Callback):
    """Runs after each step."""

    def _trigger_step(self) -> None:
        """Does nothing."""


def train(
    folder: Path,
    fuse_steps: int,
    callback: Callback | None = None,
    trainer: SimpleTrainer | None = None,
) -> dict[str, float]:
    """Returns the statistics of the last epoch, and the weights."""
    logger.set_logger_dir(str(folder))
    if trainer is None:
        tf.reset_default_graph()
        trainer = SimpleTrainer()
    trainer.fuse_steps = fuse_steps
    schedule = ScheduledHyperParamSetter("learning_rate", [(1, 0.02)])
    callbacks = [callback or ModelSaver(), schedule]
    config = TrainConfig(model=Model(), dataflow=Points(), callbacks=callbacks, max_epoch=2)
    launch_train_with_config(config, trainer)
    weights = trainer.sess.run("linear/W:0")
    return {"cost": trainer.monitors.get_latest("cost"), "first": weights[0, 0]}


def test_fused_steps_train_as_single_steps_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []
    run_block = FusedSteps.run

    def count_block(self: FusedSteps, remaining: int) -> int:
        blocks.append(run_block(self, remaining))
        return blocks[-1]

    monkeypatch.setattr(FusedSteps, "run", count_block)
    single = train(tmp_path / "single", fuse_steps=1)

    fused = train(tmp_path / "fused", fuse_steps=3)

    # Two blocks in an epoch of seven steps. The last step runs alone.
    assert blocks == [3, 3, 0, 3, 3, 0]
    assert fused == pytest.approx(single, rel=1e-5)


def test_a_trainer_with_its_own_step_refuses_fusing(tmp_path: Path) -> None:
    class OwnStep(SimpleTrainer):
        def run_step(self) -> None:
            self.hooked_sess.run(self.train_op)

    with pytest.raises(UsageError, match="OwnStep has its own run_step"):
        train(tmp_path, fuse_steps=3, trainer=OwnStep())


def test_a_callback_between_steps_refuses_fusing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"EachStep\._trigger_step runs between steps"):
        train(tmp_path, fuse_steps=3, callback=EachStep())


def test_a_schedule_by_steps_refuses_fusing(tmp_path: Path) -> None:
    schedule = ScheduledHyperParamSetter("learning_rate", [(3, 0.02)], step_based=True)

    with pytest.raises(UsageError, match=r"ScheduledHyperParamSetter\._trigger_step runs between"):
        train(tmp_path, fuse_steps=3, callback=schedule)
