"""The learning-rate range test: the rates it trains with, where it stops, and what it suggests."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask
from trainer_kit.errors import DataError, DivergedError, UsageError
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.rate_range import DIVERGED, RateRange, range_test_config, run_range_test
from trainer_kit.training.trainer import Trainer


def _create_trainer(
    task_type: type[TinyTask] = TinyTask, lowest: float = 1e-4, highest: float = 1e4, **trainer: Any
) -> Any:
    config = range_test_config(tiny_experiment(**trainer), lowest, highest, 60)
    return Trainer.create(config, task_type(config.task), True, False)


def test_the_rate_rises_by_equal_factors_until_training_diverges() -> None:
    own = {
        "initial_learning_rate": 0.1,
        "decay_steps": 10,
        "decay_rate": 0.5,
        "staircase": True,
        "offset": 7,
    }
    adam = {
        "optimizer": {"type": "adam"},
        "learning_rate": {"type": "exponential", "exponential": own},
    }

    rate_range = run_range_test(_create_trainer(optimizer_config=adam), 1e-4, 60)

    assert rate_range.ended_by == DIVERGED
    assert 20 <= len(rate_range.rates) < 60
    np.testing.assert_allclose(
        rate_range.rates, 1e-4 * 1e8 ** (np.arange(len(rate_range.rates)) / 59), rtol=1e-3
    )
    assert rate_range.losses[-1] > 4 * rate_range.losses.min()
    assert rate_range.suggestion is not None
    assert 1e-4 < rate_range.suggestion < rate_range.lowest_loss_rate < 10


def test_a_tenth_of_the_rate_with_the_lowest_loss_is_suggested() -> None:
    rates = np.logspace(-5, 1, 201)
    losses = np.log10(rates / 0.3) ** 2
    losses[20] = -1  # by chance

    rate_range = RateRange(rates, losses)

    assert rate_range.lowest_loss_rate == pytest.approx(0.3, rel=0.1)
    assert rate_range.suggestion == pytest.approx(0.03, rel=0.1)


def test_a_loss_that_does_not_fall_gets_no_suggestion() -> None:
    noise = np.random.default_rng(0).normal(0.7, 0.05, 60)
    for losses in (np.linspace(1, 2, 100), noise):
        assert RateRange(np.logspace(-5, 1, len(losses)), losses).suggestion is None


def test_few_steps_are_smoothed_too() -> None:
    losses = np.linspace(2, 1, 20)
    losses[8] = 0.9  # by chance

    assert RateRange(np.logspace(-5, 1, 20), losses).is_still_falling


class _OwnRate(LinearTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return keras.optimizers.SGD(0.5)


def test_an_optimizer_with_a_rate_of_its_own_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"_OwnRate\.create_optimizer returns .* the learning rate 0\.5"
    ):
        run_range_test(_create_trainer(_OwnRate), 1e-4, 60)


class _Several(LinearTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return {name: keras.optimizers.SGD(0.5) for name in ("left", "right")}


def test_several_optimizers_are_refused() -> None:
    with pytest.raises(
        UsageError, match="is for one optimizer, and this experiment has left, right"
    ):
        run_range_test(_create_trainer(_Several), 1e-4, 60)


class _Short(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return super().build_inputs(params.replace(is_training=False), input_context)


def test_several_optimizers_of_the_config_are_refused_first() -> None:
    rate = {"type": "constant", "constant": {"learning_rate": 0.1}}
    several = {
        name: {"optimizer": {"type": "sgd"}, "learning_rate": rate} for name in ("left", "right")
    }

    with pytest.raises(
        UsageError, match="is for one optimizer, and this experiment has left, right"
    ):
        _create_trainer(optimizers=several, optimizer_config={})


def test_data_that_ends_at_once_is_an_error() -> None:
    with pytest.raises(DataError, match="ended after 12 steps, and a range test needs 20"):
        run_range_test(_create_trainer(_Short), 1e-4, 60)


class _NotFinite(LinearTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return tf.math.log(-tf.reduce_sum(tf.square(model_outputs)))


def test_training_that_diverges_at_the_lowest_rates_is_an_error() -> None:
    with pytest.raises(
        DivergedError,
        match=r"diverged after 0 steps, at the learning rate 0\.0001; begin at a lower",
    ):
        run_range_test(_create_trainer(_NotFinite), 1e-4, 60)
