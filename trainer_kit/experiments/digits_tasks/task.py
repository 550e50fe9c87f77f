"""The tasks of `digits_tasks`: the data and the loss of each, and the net of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit
from trainer_kit import DataConfig

HELD_OUT = 360  # a fifth of the 1,797 images
PIXELS = 64
CLASSES = {"digit": 10, "parity": 2}


class LabelTask(trainer_kit.Task):
    """Tells digits, or even digits from odd ones, by cross entropy; the metric is `accuracy`."""

    def build_model(self) -> keras.Model:
        """Returns a net for this task alone.

        It maps pixels, float32 [batch, 64] in 0..1, to logits [batch, classes].
        """
        return build_shared_nets({"alone": self.task_config.label}, hidden=64)["alone"]

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns the pixels and labels of the training part or, to evaluate, the held-out part."""
        del input_context  # the source gets it when it is asked for its dataset
        pixels, digits = split_digits()[0 if params.is_training else 1]
        return trainer_kit.ArraySource((pixels, digits % CLASSES[self.task_config.label]), params)

    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the mean cross entropy, in nats."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs)
        return tf.reduce_mean(losses) + super().build_losses(labels, model_outputs, aux_losses)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracy."""
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


class DigitsTasks(trainer_kit.MultiTask):
    """Tells digits and their parity with one net."""

    def build_models(self) -> dict[str, keras.Model]:
        """Returns the net of each task; the hidden layer is shared."""
        labels = {name: task.task_config.label for name, task in self.tasks.items()}
        return build_shared_nets(labels, self.task_config.model.hidden)


def build_shared_nets(labels: Mapping[str, str], hidden: int) -> dict[str, keras.Model]:
    """Returns a net for each task, with one hidden layer in common.

    Args:
      labels: What each task tells apart, by the name of the task.
      hidden: The width of the hidden layer.
    """
    pixels = keras.Input((PIXELS,))
    features = keras.layers.Dense(hidden, activation="relu", name="hidden")(pixels)
    return {
        name: keras.Model(
            pixels, keras.layers.Dense(CLASSES[label], name=f"{name}_logits")(features), name=name
        )
        for name, label in labels.items()
    }


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns ((pixels, digits) to train on, (pixels, digits) held out).

    They are 1,437 and 360 examples, always the same ones.

    Every digit has the same share in both, and no image is in both. Pixels are float32 [n, 64] in
    0..1, digits int32 [n].
    """
    data = load_digits()
    pixels = (data.data / 16).astype(np.float32)
    digits = data.target.astype(np.int32)
    parts = train_test_split(pixels, digits, test_size=HELD_OUT, stratify=digits, random_state=0)
    return (parts[0], parts[2]), (parts[1], parts[3])
