"""The task of `digits`: the data, the net, its loss and its metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit
from trainer_kit import DataConfig

HELD_OUT = 360  # a fifth of the 1,797 images


class DigitsTask(trainer_kit.Task):
    """Tells the ten digits apart, by cross entropy; the metric is `accuracy`."""

    def build_model(self) -> keras.Model:
        """Returns the net: images [batch, 8, 8, 1] of float32 in 0..1 to logits [batch, 10]."""
        layers = keras.layers
        width = self.task_config.model.width
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(width, 3, padding="same", activation="relu"),
                layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dropout(self.task_config.model.dropout),
                layers.Dense(10),
            ],
            name="digits",
        )

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns the images and labels of the training part or, to evaluate, the held-out part."""
        del input_context  # the source gets it when it is asked for its dataset
        return trainer_kit.ArraySource(split_digits()[0 if params.is_training else 1], params)

    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the mean cross entropy, in nats."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs)
        return tf.reduce_mean(losses) + super().build_losses(labels, model_outputs, aux_losses)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracy."""
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns ((images, labels) to train on, (images, labels) held out).

    They are 1,437 and 360 examples, always the same ones.

    Every digit has the same share in both. No image is in both; the 13 people who wrote them are
    (the data does not say who wrote what). Images are float32 [n, 8, 8, 1] in 0..1, labels int32
    [n].
    """
    data = load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    parts = train_test_split(
        images,
        data.target.astype(np.int32),
        test_size=HELD_OUT,
        stratify=data.target,
        random_state=0,
    )
    return (parts[0], parts[2]), (parts[1], parts[3])
