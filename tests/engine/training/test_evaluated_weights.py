"""Which values weights and random generators have while an evaluation runs, and after it."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.optimizers.moving_average import MovingAverage
from trainer_kit.training.evaluator import WeightSelector


class _Model(tf.Module):
    """A weight of 2.0, whose average is 1.0, and a random generator."""

    def __init__(self, averaged: bool) -> None:
        super().__init__()
        self.weight = tf.Variable(1.0)
        self.generator = tf.random.Generator.from_seed(3)
        self._average = MovingAverage([self.weight], EMAConfig()) if averaged else None
        self.weight.assign(2.0)
        self.state = TrainState(
            tf.Variable(0, dtype=tf.int64), self, None, self._average, None, seed=0
        )
        self.evaluated = WeightSelector(self.state, self._average)

    def draw(self) -> float:
        return float(self.generator.normal([]))


@pytest.mark.parametrize("averaged", [True, False])
def test_training_draws_what_it_would_without_the_evaluation(averaged: bool) -> None:
    model = _Model(averaged)
    other = _Model(averaged)

    with model.evaluated.use_weights():
        model.state.remember_generators()
        model.draw()

    assert model.draw() == other.draw()


def test_what_training_draws_later_is_not_undone() -> None:
    model = _Model(averaged=False)
    model.state.remember_generators()
    drawn: list[Any] = []

    for _ in range(3):  # such as late saves
        model.evaluated.restore_trained_weights()
        drawn.append(model.draw())

    assert len(set(drawn)) == 3
