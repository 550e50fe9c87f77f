"""A small regression on made-up points, as a program of Tensorpack."""

from __future__ import annotations

from typing import Any

import numpy as np
from trainer_kit.compat.tensorpack.dataflow import DataFromList

from trainer_kit.compat.tensorpack import *
from trainer_kit.compat.tensorpack import tfv1 as tf


class Model(ModelDesc):
    def inputs(self) -> list[Any]:
        return [
            tf.TensorSpec((None, 2), tf.float32, "point"),
            tf.TensorSpec((None,), tf.float32, "target"),
        ]

    def build_graph(self, point: Any, target: Any) -> Any:
        outputs = FullyConnected("fc", BatchNorm("bn", point), 1)
        return tf.reduce_mean(tf.square(outputs[:, 0] - target), name="cost")

    def optimizer(self) -> Any:
        return tf.train.GradientDescentOptimizer(0.05)


def make_data(count: int, seed: int) -> list[list[Any]]:
    points = np.random.RandomState(seed).normal(2.0, 3.0, (count, 2)).astype("float32")
    return [[point, point.sum()] for point in points]


@register_experiment("regression")
def regression() -> None:
    validation = BatchData(DataFromList(make_data(20, 2), shuffle=False), 8, remainder=True)
    config = AutoResumeTrainConfig(
        model=Model(),
        data=FeedInput(BatchData(DataFromList(make_data(60, 1), shuffle=True), 8)),
        callbacks=[
            ModelSaver(),
            InferenceRunner(validation, ScalarStats("cost")),
            MinSaver("validation_cost"),
        ],
        steps_per_epoch=5,
        max_epoch=4,
    )
    launch_train_with_config(config, SimpleTrainer())
