"""How a training ends before its last epoch, and what an evaluation covers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_kit.compat.tensorpack import (
    Callback,
    DataFlow,
    FeedInput,
    FullyConnected,
    HookToCallback,
    InferenceRunner,
    MinSaver,
    ModelDesc,
    PeriodicTrigger,
    QueueInput,
    ScalarStats,
    SimpleTrainer,
    StopTraining,
    SyncMultiGPUTrainerReplicated,
    TrainConfig,
    launch_train_with_config,
    logger,
)
from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.errors import UsageError


class Points(DataFlow):
    """Six batches of one point."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        for index in range(6):
            yield [np.full((1, 2), index, np.float32)]

    def __len__(self) -> int:
        return 6


class Model(ModelDesc):
    """A linear layer."""

    def inputs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([None, 2], tf.float32, "points")]

    def build_graph(self, points: tf.Tensor) -> tf.Tensor:
        outputs = FullyConnected("linear", points, 1)
        return tf.reduce_mean(tf.square(outputs - 1.0), name="cost")

    def optimizer(self) -> object:
        return tf.train.GradientDescentOptimizer(0.001)


def train(
    folder: Path, *callbacks: Callback, trainer: Any = None, **options: object
) -> SimpleTrainer:
    logger.set_logger_dir(str(folder))
    trainer = trainer or SimpleTrainer()
    arguments = {"data": FeedInput(Points()), "steps_per_epoch": 3, "max_epoch": 4, **options}
    config = TrainConfig(model=Model(), callbacks=list(callbacks), **arguments)
    launch_train_with_config(config, trainer)
    return trainer


class StopInEpoch(Callback):
    """Ends the training where its third epoch begins."""

    def _before_epoch(self) -> None:
        if self.epoch_num == 3:
            raise StopTraining("enough")


def test_a_callback_stops_before_the_first_step_of_an_epoch(tmp_path: Path) -> None:
    trainer = train(tmp_path, StopInEpoch())

    assert trainer.global_step == 6
    assert trainer.stop_reason == "enough"
    assert (tmp_path / "final.json").exists()


def test_a_training_ends_with_finite_data(tmp_path: Path) -> None:
    trainer = train(tmp_path, data=FeedInput(Points(), infinite=False))

    assert trainer.global_step == 6
    assert "Points has ended" in trainer.stop_reason


def test_a_hook_stops_the_training(tmp_path: Path) -> None:
    trainer = train(tmp_path, HookToCallback(tf.train.StopAtStepHook(num_steps=4)))

    assert trainer.global_step == 4


def test_a_stray_stop_iteration_is_an_error(tmp_path: Path) -> None:
    class Careless(Callback):
        def _trigger_step(self) -> None:
            next(iter(()))

    with pytest.raises(RuntimeError, match="has raised StopIteration"):
        train(tmp_path, Careless())


def test_runners_of_two_periods_are_both_in_an_evaluation(tmp_path: Path) -> None:
    often = InferenceRunner(Points(), [ScalarStats("cost", prefix="often")])
    rarely = InferenceRunner(
        Points(), [ScalarStats("cost", prefix="rarely")], tower_name="RareTower"
    )

    train(tmp_path, often, PeriodicTrigger(rarely, every_k_epochs=2), MinSaver("rarely_cost"))

    lines = (tmp_path / "evals" / "validation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    assert all({"often_cost", "rarely_cost"} <= record["metrics"].keys() for record in records)


def test_a_run_keeps_its_first_epoch(tmp_path: Path) -> None:
    train(tmp_path, max_epoch=2)
    tf.reset_default_graph()

    with pytest.raises(UsageError, match=r"starting_epoch=3: the run .* began with epoch 1"):
        train(tmp_path, starting_epoch=3)


@pytest.mark.parametrize("trainer_class", [SimpleTrainer, SyncMultiGPUTrainerReplicated])
def test_a_resumed_run_continues_inside_a_pass(tmp_path: Path, trainer_class: Any) -> None:
    weights = []
    for epochs in ([3], [1, 3]):
        folder = tmp_path / f"{len(epochs)}"
        for max_epoch in epochs:
            tf.reset_default_graph()
            towers = [] if trainer_class is SimpleTrainer else [2]
            trainer = trainer_class(*towers)
            data = QueueInput(Points())
            train(folder, trainer=trainer, data=data, steps_per_epoch=4, max_epoch=max_epoch)
        weights.append(trainer.sess.run("linear/W:0").tolist())

    assert weights[0] == weights[1]


def test_an_initializer_takes_a_fed_value() -> None:
    value = tf.placeholder(tf.float32, [2])
    fed = tf.get_variable("fed", initializer=value)
    plain = tf.get_variable("plain", [2], initializer=tf.ones_initializer())
    session = tf.Session()

    session.run(fed.initializer, {value: [3.0, 4.0]})

    assert session.run([fed, plain])[0].tolist() == [3.0, 4.0]
    assert plain.eval().tolist() == [1.0, 1.0]
