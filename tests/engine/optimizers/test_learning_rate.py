"""The rate of an optimizer: the current one, factors of it, and a changed rate of the config."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.learning_rate import (
    ConfiguredRates,
    add_learning_rate_factor,
    current_learning_rate,
    learning_rate_factors,
)

COSINE = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {
        "type": "cosine",
        "cosine": {"initial_learning_rate": 0.4, "decay_steps": 100},
    },
}


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_the_current_rate_is_that_of_the_next_step(dtype: str | None) -> None:
    optimizer = create_optimizer(OptimizationConfig(**COSINE), mixed_precision_dtype=dtype)
    rate = tf.function(lambda: current_learning_rate(optimizer))

    assert float(rate()) == pytest.approx(0.4)

    optimizer.iterations.assign(50)

    assert float(rate()) == pytest.approx(0.2)
    assert rate().dtype == tf.float32
    assert float(current_learning_rate(optimizer, step=100)) == pytest.approx(0.0, abs=1e-7)


def test_an_object_with_nothing_but_a_rate_has_a_current_rate() -> None:
    class Plain:
        learning_rate = 0.75

    assert float(current_learning_rate(Plain())) == 0.75

    with pytest.raises(UsageError, match="object has no learning_rate"):
        current_learning_rate(object())


def test_an_optimizer_that_consists_of_several_has_their_rates() -> None:
    class Composite:
        optimizers = (keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.25))

    assert {name: float(rate) for name, rate in current_learning_rate(Composite()).items()} == {
        "0": 0.5,
        "1": 0.25,
    }


@pytest.mark.parametrize(
    "rate", [0.5, keras.optimizers.schedules.CosineDecay(0.5, 10)], ids=["constant", "schedule"]
)
def test_factors_multiply_the_rate_of_a_traced_function(rate: Any) -> None:
    optimizer = keras.optimizers.SGD(rate)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    for name in ("one", "other"):
        add_learning_rate_factor(optimizer, name)
    update = tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]))
    rates = tf.function(lambda: current_learning_rate(optimizer))
    for values in ((1.0, 0.5), (0.5, 0.25)):
        for factor, value in zip(learning_rate_factors(optimizer).values(), values, strict=True):
            factor.assign(value)
        configured = float(rate(optimizer.iterations) if callable(rate) else rate)
        rate_before = float(rates())
        before = float(variable)
        update()
        assert rate_before == pytest.approx(configured * values[0] * values[1])
        assert before - float(variable) == pytest.approx(rate_before)


def test_what_has_no_learning_rate_of_keras_3_has_no_factor() -> None:
    with pytest.raises(
        UsageError, match="object has no learning rate that a factor could multiply"
    ):
        add_learning_rate_factor(object(), "one")


def _create_legacy_optimizer(rate: Any) -> Any:
    optimizer = tf_keras.optimizers.legacy.Adam(rate)
    optimizer._create_all_weights([tf.Variable(1.0)])
    return optimizer


def _create_averaging_optimizer(rate: Any) -> Any:
    garden = pytest.importorskip("official.modeling.optimization")
    return garden.ExponentialMovingAverage(_create_legacy_optimizer(rate))


RATED: dict[str, Any] = {
    "Keras 3": keras.optimizers.Adam,
    "Keras 2": tf_keras.optimizers.Adam,
    "legacy": _create_legacy_optimizer,
    "legacy, scaled": lambda rate: tf_keras.mixed_precision.LossScaleOptimizer(
        _create_legacy_optimizer(rate)
    ),
    "averaging": _create_averaging_optimizer,
}


@pytest.mark.parametrize("kind", RATED)
def test_a_changed_rate_in_the_config_wins(kind: str) -> None:
    for configured, expected in ((0.5, 0.25), (0.75, 0.75)):
        before = ConfiguredRates(RATED[kind](0.5)).state()
        optimizer = RATED[kind](configured)
        rates = ConfiguredRates(optimizer)
        optimizer.learning_rate = 0.25  # as it was restored
        rates.restore(before)
        assert float(current_learning_rate(optimizer)) == expected
        rates.restore(None)  # by a checkpoint that tells no rates
        assert float(current_learning_rate(optimizer)) == expected


def test_schedules_and_what_has_no_rate_are_left_alone() -> None:
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.5, 10)
    for optimizer in (
        tf_keras.optimizers.Adam(schedule),
        tf_keras.optimizers.legacy.Adam(schedule),
        None,
        object(),
    ):
        rates = ConfiguredRates(optimizer)
        assert rates.state() == {}
        rates.restore({"": 0.5})
