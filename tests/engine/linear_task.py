"""The tiny task with a model of one layer, since a short run spends its time on traces."""

from __future__ import annotations

from typing import Any

import keras

from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.testing import CLASSES, FEATURES, TinyConfig, TinyTask, tiny_experiment

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


def linear_experiment(**trainer: Any) -> ExperimentConfig:
    """Returns the tiny experiment with this task; `trainer` changes its trainer section."""
    return tiny_experiment(**trainer).replace(task=LinearConfig())
