"""The average that an optimizer of Model Garden keeps: exchanged bit by bit, on every replica,
wrapped or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tf_keras
from official.modeling import optimization

from tests.builders import replicas
from tests.engine.compat.model_garden.garden_task import bits
from tests.engine.linear_task import linear_experiment
from trainer_kit.compat.model_garden.optimizers import (
    OptimizerAverages,
    check_single_average,
    find_averaging_optimizer,
)
from trainer_kit.errors import UsageError


def _build_model() -> Any:
    return tf_keras.Sequential(
        [tf_keras.Input((3,)), tf_keras.layers.Dense(4), tf_keras.layers.BatchNormalization()]
    )


def _build_averaging(model: Any, trainable_only: bool = True) -> Any:
    """Returns an averaging optimizer whose averages, and the weights, are of many magnitudes. In
    scope.
    """
    optimizer = optimization.ExponentialMovingAverage(
        tf_keras.optimizers.legacy.SGD(), trainable_only
    )
    optimizer.shadow_copy(model)
    generator = np.random.default_rng(0)
    for variable in [*model.variables, *optimizer._average_weights]:
        variable.assign(10.0 ** generator.uniform(-6, 6, variable.shape))
    return optimizer


@pytest.mark.parametrize(("devices", "wrapped"), [(1, False), (2, True)])
@pytest.mark.parametrize("trainable_only", [False, True])
def test_a_swap_exchanges_bits_and_a_second_one_undoes_it(
    devices: int, wrapped: bool, trainable_only: bool
) -> None:
    with replicas(devices).scope():
        model = _build_model()
        optimizer = _build_averaging(model, trainable_only)
        wrapper = tf_keras.mixed_precision.LossScaleOptimizer(optimizer) if wrapped else optimizer
        average = OptimizerAverages(wrapper, model)
    averaged = model.trainable_variables if trainable_only else model.variables
    weights = bits(averaged)
    averages = bits(optimizer._average_weights)
    others = bits(model.non_trainable_variables)

    average.swap()
    assert average.active_average
    assert bits(averaged) == averages
    assert bits(optimizer._average_weights) == weights
    assert not trainable_only or bits(model.non_trainable_variables) == others

    average.swap()
    assert not average.active_average
    assert bits(averaged) == weights
    assert bits(optimizer._average_weights) == averages


def test_a_reset_makes_the_averages_equal_to_the_weights() -> None:
    with replicas(2).scope():
        model = _build_model()
        optimizer = _build_averaging(model)
        average = OptimizerAverages(optimizer, model)
    weights = bits(model.variables)
    average.reset()

    assert bits(optimizer._average_weights) == bits(model.trainable_variables)
    assert bits(model.variables) == weights


def test_missing_averages_are_made_and_begin_at_zero() -> None:
    model = _build_model()
    optimizer = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.SGD())
    average = OptimizerAverages(optimizer, model)
    average.initialize()
    average.update(1)
    assert optimizer.has_shadow_copy
    assert not any(np.any(value) for value in optimizer._average_weights)

    averages = [*optimizer._average_weights]
    OptimizerAverages(optimizer, model)
    for average_value, same_value in zip(averages, optimizer._average_weights, strict=True):
        assert average_value is same_value


def test_only_an_averaging_optimizer_averages() -> None:
    plain = tf_keras.optimizers.legacy.SGD()
    ema = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.SGD())
    loss_scale = tf_keras.mixed_precision.LossScaleOptimizer

    assert find_averaging_optimizer(ema) is ema
    assert find_averaging_optimizer(loss_scale(ema)) is ema
    for other in (plain, tf_keras.optimizers.SGD(), loss_scale(plain), None, {}):
        assert find_averaging_optimizer(other) is None


@pytest.mark.parametrize(
    "ema", [{"more_decays": {"fast": 0.5}}, {"evaluate": ("average", "weights")}], ids=str
)
def test_an_optimizer_with_several_averages_is_refused(ema: dict[str, Any]) -> None:
    one_average = linear_experiment(optimizer_config={"ema": {"average_decay": 0.5}})
    several_averages = linear_experiment(optimizer_config={"ema": ema})

    check_single_average(one_average.trainer)
    message = "keeps one average, which evaluations use; remove more_decays and evaluate"
    with pytest.raises(UsageError, match=message):
        check_single_average(several_averages.trainer)
