"""Two towers in one graph, against both computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow
from trainer_kit.compat.tensorpack.dataflow import DataFromList
from trainer_kit.compat.tensorpack.graph_builder import DataParallelBuilder
from trainer_kit.compat.tensorpack.tfutils.tower import TowerFunc
from trainer_kit.compat.tensorpack.utils import logger

from trainer_kit.compat.tensorpack import (
    BatchNorm,
    FeedInput,
    FullyConnected,
    ModelDesc,
    QueueInput,
    SyncMultiGPUTrainer,
    SyncMultiGPUTrainerParameterServer,
    SyncMultiGPUTrainerReplicated,
    TowerTrainer,
    TrainConfig,
    launch_train_with_config,
)
from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.errors import UsageError

STEPS = 4
RATE = 0.1
TRAINERS = {
    "parameter server on CPU": lambda: SyncMultiGPUTrainerParameterServer([0, 1], "cpu"),
    "parameter server on GPU": lambda: SyncMultiGPUTrainerParameterServer([0, 1], "gpu"),
    "replicated": lambda: SyncMultiGPUTrainerReplicated(2),
    "replicated with nccl": lambda: SyncMultiGPUTrainerReplicated(2, mode="nccl"),
}


def make_batches() -> list[list[np.ndarray]]:
    random = np.random.RandomState(3)
    return [[random.normal(2.0, 3.0, (6, 3)).astype("float32")] for _ in range(2 * STEPS)]


class Regression(ModelDesc):
    def __init__(self, sync_statistics: str | None = None) -> None:
        self._sync_statistics = sync_statistics

    def inputs(self) -> list[Any]:
        return [tf.TensorSpec((None, 3), tf.float32, "x")]

    def build_graph(self, x: Any) -> Any:
        normal = BatchNorm("bn", x, sync_statistics=self._sync_statistics)
        output = FullyConnected("fc", normal, 1, kernel_initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.square(output - tf.reduce_sum(x, 1, keepdims=True)), name="cost")

    def optimizer(self) -> Any:
        return tf.train.GradientDescentOptimizer(RATE)


def train_by_hand() -> dict[str, np.ndarray]:
    batches = make_batches()
    variables = {
        "bn/gamma": tensorflow.Variable(tensorflow.ones([3])),
        "bn/beta": tensorflow.Variable(tensorflow.zeros([3])),
        "fc/W": tensorflow.Variable(tensorflow.ones([3, 1])),
        "fc/b": tensorflow.Variable(tensorflow.zeros([1])),
    }
    average = np.zeros(3, "float32")
    for step in range(STEPS):
        towers = [batches[2 * step][0], batches[2 * step + 1][0]]
        gradients = []
        for x in towers:
            # The gradient of a tower's loss goes through the statistics.
            with tensorflow.GradientTape() as tape:
                mean, variance = tensorflow.nn.moments(tensorflow.constant(x), [0])
                normal = (x - mean) / tensorflow.sqrt(variance + 1e-5)
                normal = normal * variables["bn/gamma"] + variables["bn/beta"]
                output = normal @ variables["fc/W"] + variables["fc/b"]
                target = tensorflow.reduce_sum(x, 1, keepdims=True)
                loss = tensorflow.reduce_mean(tensorflow.square(output - target))
            gradients.append(tape.gradient(loss, list(variables.values())))
            if x is towers[0]:
                average = 0.9 * average + 0.1 * mean.numpy()
        for variable, first, second in zip(variables.values(), *gradients, strict=True):
            variable.assign_sub(RATE * (first + second) / 2.0)
    values = {name: variable.numpy() for name, variable in variables.items()}
    return {**values, "bn/mean/EMA": average}


def train(trainer: Any, model: Regression, tmp_path: object) -> dict[str, np.ndarray]:
    logger.set_logger_dir(f"{tmp_path}/run")
    source = QueueInput(DataFromList(make_batches(), shuffle=False))
    config = TrainConfig(model=model, data=source, steps_per_epoch=STEPS, max_epoch=1)
    launch_train_with_config(config, trainer)
    return {name: variable.eval() for name, variable in trainer.program.variables.items()}


@pytest.mark.parametrize("name", TRAINERS)
def test_two_towers_average_gradients(name: str, tmp_path: object) -> None:
    expected = train_by_hand()
    trainer = TRAINERS[name]()

    values = train(trainer, Regression(), tmp_path)

    for variable, value in expected.items():
        np.testing.assert_allclose(values[variable], value, rtol=1e-5, atol=1e-6, err_msg=variable)
    costs = [tower.get_tensor("cost").op.name for tower in trainer.towers.training()]
    assert costs == ["tower0/cost", "tower1/cost"]


def test_the_default_trainer_averages_on_the_cpu() -> None:
    trainer = SyncMultiGPUTrainer([0, 1])

    assert isinstance(trainer, SyncMultiGPUTrainerParameterServer)
    assert trainer._builder.ps_device == "cpu"


def test_statistics_over_towers_are_refused(tmp_path: object) -> None:
    with pytest.raises(UsageError, match=r"sync_statistics='nccl'.*leave it out"):
        train(SyncMultiGPUTrainerReplicated(2), Regression("nccl"), tmp_path)


class TwoTowerGAN(TowerTrainer):
    def __init__(self, source: Any) -> None:
        super().__init__()
        signature = [tf.TensorSpec((None, 3), tf.float32, "x")]
        self.register_callback(source.setup(signature))
        self.tower_func = TowerFunc(self.build_losses, signature)
        losses = DataParallelBuilder.call_for_each_tower(
            [0, 1], lambda: self.tower_func(*source.get_input_tensors()), ["/gpu:0", "/gpu:1"]
        )
        g_loss = tf.add_n([pair[0] for pair in losses]) / 2.0
        d_loss = tf.add_n([pair[1] for pair in losses]) / 2.0
        optimizer = tf.train.GradientDescentOptimizer(RATE)
        gen, discrim = tf.trainable_variables("gen"), tf.trainable_variables("discrim")
        g_min = optimizer.minimize(g_loss, var_list=gen, colocate_gradients_with_ops=True)
        with tf.control_dependencies([g_min]):
            self.train_op = optimizer.minimize(d_loss, var_list=discrim)

    def build_losses(self, x: Any) -> list[Any]:
        shift = tf.get_variable("gen/shift", [3], initializer=tf.zeros_initializer())
        with tf.variable_scope("discrim", reuse=tf.AUTO_REUSE):
            weight = tf.get_variable("weight", [3], initializer=tf.ones_initializer())
        real = tf.reduce_mean(tf.reduce_sum(x * weight, 1))
        fake = tf.reduce_mean(tf.reduce_sum((x**2 + shift) * weight, 1))
        return [-fake, tf.square(fake - real)]


def test_a_gan_with_two_towers_averages_losses(tmp_path: object) -> None:
    logger.set_logger_dir(f"{tmp_path}/run")
    batches = make_batches()
    trainer = TwoTowerGAN(QueueInput(DataFromList(batches, shuffle=False)))

    trainer.train_with_defaults(steps_per_epoch=2, max_epoch=1)

    shift = np.zeros(3)
    weight = np.ones(3)
    for step in range(2):
        pair = [batches[2 * step][0], batches[2 * step + 1][0]]
        slopes = []
        for x in pair:
            difference = (x**2 + shift).mean(0) - x.mean(0)
            slopes.append(2.0 * (difference @ weight) * difference)
        shift = shift + RATE * weight
        weight = weight - RATE * np.mean(slopes, 0)
    np.testing.assert_allclose(trainer.program.variables["gen/shift"].eval(), shift, rtol=1e-4)
    np.testing.assert_allclose(
        trainer.program.variables["discrim/weight"].eval(), weight, rtol=1e-4
    )


def test_two_towers_refuse_an_input_that_they_share(tmp_path: object) -> None:
    logger.set_logger_dir(f"{tmp_path}/run")
    source = FeedInput(DataFromList(make_batches(), shuffle=False))
    config = TrainConfig(model=Regression(), data=source, steps_per_epoch=STEPS, max_epoch=1)

    with pytest.raises(UsageError, match=r"FeedInput.*QueueInput"):
        launch_train_with_config(config, SyncMultiGPUTrainerReplicated(2))
