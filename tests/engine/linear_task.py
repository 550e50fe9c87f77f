"""The tiny task with a model of one layer, since a short run spends its time on traces."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.testing import (
    CLASSES,
    FEATURES,
    TinyConfig,
    TinyTask,
    tiny_arrays,
    tiny_experiment,
)

SGD = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.01}},
}


@configclass
class LinearConfig(TinyConfig):
    """Classification of random points by a linear model, whose width counts for nothing."""


@register_task(LinearConfig)
class LinearTask(TinyTask):
    """One dense layer, behind dropout where the config asks for it."""

    def build_model(self) -> keras.Model:
        layers = (
            [keras.layers.Dropout(self.task_config.dropout)] if self.task_config.dropout else []
        )
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])


class BatchSource:
    """A hundred ready-made batches of the tiny task's training data, for runs that open it often.

    No function is traced to open it.

    Args:
      bad: The indices of batches of NaN.
      without: The indices of batches that are left out.
    """

    def __init__(self, bad: tuple[int, ...] = (), *, without: tuple[int, ...] = ()) -> None:
        points, labels = tiny_arrays(True, 100 * 8)
        batches = points.reshape(100, 8, FEATURES).copy()
        batches[list(bad)] = float("nan")
        self._points = np.delete(batches, without, axis=0)
        self._labels = np.delete(labels.reshape(100, 8), without, axis=0)

    def at(self, position: int, input_context: Any = None) -> tf.data.Dataset:
        batches = (self._points[position:], self._labels[position:])
        return tf.data.Dataset.from_tensor_slices(batches)


def linear_experiment(**trainer: Any) -> ExperimentConfig:
    """Returns the tiny experiment with this task; `trainer` changes its trainer section."""
    return tiny_experiment(**trainer).replace(task=LinearConfig())
