"""A tiny task with data in memory, for tests of trainer_kit and of what users build on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import (
    DataConfig,
    ExperimentConfig,
    TaskConfig,
    TrainerConfig,
)
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.training.task import Task

FEATURES = 8
CLASSES = 3
EXAMPLES = 103


@configclass
class TinyConfig(TaskConfig):
    """Classification of random points by a random linear rule.

    Attributes:
      width: The width of the hidden layer.
      dropout: The dropout rate.
      examples: The number of examples in each of the two datasets.
    """

    width: int = 16
    dropout: float = 0.0
    examples: int = EXAMPLES
    train_data: DataConfig = DataConfig(is_training=True, global_batch_size=8, seed=7)
    validation_data: DataConfig = DataConfig(
        is_training=False, global_batch_size=8, drop_remainder=False
    )


@register_task(TinyConfig)
class TinyTask(Task):
    """Two dense layers on points in a cube: hundreds of steps take a fraction of a second."""

    def build_model(self) -> keras.Model:
        """Returns the model."""
        config = self.task_config
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(config.width, activation="relu"),
                keras.layers.Dropout(config.dropout),
                keras.layers.Dense(CLASSES),
            ]
        )

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> ArraySource:
        """Returns the training or the validation points."""
        arrays = tiny_arrays(bool(params.is_training), self.task_config.examples)
        return ArraySource(arrays, params)

    @tf.autograph.experimental.do_not_convert
    def build_losses(
        self,
        labels: tf.Tensor,
        model_outputs: tf.Tensor,
        aux_losses: Sequence[tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns the mean cross-entropy and what layers added."""
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, model_outputs, from_logits=True
        )
        # tf.add_n needs a tensor.
        layer_losses = list(aux_losses or []) or [tf.constant(0.0)]
        return tf.reduce_mean(losses) + tf.add_n(layer_losses)

    @tf.autograph.experimental.do_not_convert
    def build_metrics(self, training: bool = True) -> list[keras.Metric]:
        """Returns the accuracy."""
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]


@functools.cache
def tiny_arrays(training: bool, examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns points, float32 [examples, FEATURES], and labels, int32 [examples].

    The same rule gives the labels of both datasets. The arrays cannot be written to.
    """
    rule = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    generator = np.random.default_rng(1 if training else 2)
    coordinates = generator.uniform(-1, 1, (examples, FEATURES))
    points = coordinates.astype(np.float32)
    scores = points @ rule
    best_classes = np.argmax(scores, axis=1)
    labels = best_classes.astype(np.int32)
    # Every caller gets these arrays.
    points.flags.writeable = False
    labels.flags.writeable = False
    return points, labels


def tiny_experiment(**trainer: Any) -> ExperimentConfig:
    """Returns an experiment of 20 steps in loops of 5, on CPU.

    `trainer` changes its trainer section.
    """
    optimization = {
        # Momentum has slot variables, as Adam has, and fewer operations to trace.
        "optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.01}},
    }
    defaults: dict[str, Any] = {
        "optimizer_config": optimization,
        "train_steps": 20,
        "steps_per_loop": 5,
        "summary_interval": 5,
        "checkpoint_interval": 10,
        "validation_interval": 10,
    }
    return ExperimentConfig(task=TinyConfig(), trainer=TrainerConfig(**{**defaults, **trainer}))
