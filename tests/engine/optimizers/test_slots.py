"""Slots of all optimizers in checkpoints: a resumed optimizer continues with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import optimization
from trainer_kit.checkpoints.state.variable_names import optimizer_variables
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients


class _Run:
    """A small model and its optimizer, and what a checkpoint of them holds."""

    def __init__(self, config: OptimizationConfig) -> None:
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)]
        )
        self.optimizer = create_optimizer(config)
        self.optimizer.build(self.model.trainable_variables)
        weights = {
            f"w{i}": variable.value for i, variable in enumerate(self.model.trainable_variables)
        }
        slots: Any = optimizer_variables(self.optimizer, self.model)
        self.saved = {**weights, **slots}

    def train(self, steps: int) -> None:
        variables = self.model.trainable_variables
        for step in range(steps):
            apply_gradients(
                self.optimizer, [(tf.fill(v.shape, 0.1 * (step + 1)), v) for v in variables]
            )

    def values(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.saved.items()}


@pytest.mark.parametrize("kind", OptimizerConfig.branches())
def test_a_resumed_optimizer_has_the_same_slots(kind: str, tmp_path: Path) -> None:
    first = _Run(optimization(kind))
    second = _Run(optimization(kind))

    assert first.saved.keys() == second.saved.keys()

    first.train(2)
    path = tf.train.Checkpoint(all=first.saved).write(str(tmp_path / "ckpt"))

    tf.train.Checkpoint(all=second.saved).read(path).assert_consumed()

    for run in (first, second):
        run.train(2)

    assert first.saved

    for name, value in first.values().items():
        np.testing.assert_array_equal(value, second.values()[name], err_msg=name)
