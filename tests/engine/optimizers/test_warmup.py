"""Warm-ups, compared with Model Garden's classes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.modeling.optimization import lr_schedule

from trainer_kit.optimizers.rate_schedules import LinearWarmup, PolynomialWarmup

STEPS = (0, 1, 5, 9, 10, 11, 30, 100)
AFTER = (0.5, 20)


def keras_pair(kind: str) -> tuple[Any, Any]:
    """The same schedule of Keras 3 and of tf_keras, or a constant."""
    if kind == "constant":
        return 0.5, 0.5
    return keras.optimizers.schedules.CosineDecay(*AFTER), tf_keras.optimizers.schedules.CosineDecay(*AFTER)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("start", [0.0, 0.2])
def test_linear_equals_model_garden(kind: str, start: float) -> None:
    after, theirs_after = keras_pair(kind)
    ours, theirs = LinearWarmup(after, 10, start), lr_schedule.LinearWarmup(theirs_after, 10, start)
    expected = [float(theirs(tf.constant(step, tf.int64))) for step in STEPS]
    np.testing.assert_allclose([float(ours(step)) for step in STEPS], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_equals_model_garden(kind: str, power: float) -> None:
    after, theirs_after = keras_pair(kind)
    ours, theirs = PolynomialWarmup(after, 10, power), lr_schedule.PolynomialWarmUp(theirs_after, 10, power)
    expected = [float(theirs(tf.constant(step, tf.int64))) for step in STEPS]
    np.testing.assert_allclose([float(ours(step)) for step in STEPS], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("warmup", [LinearWarmup, PolynomialWarmup])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_there_is_no_jump_where_the_schedule_takes_over(warmup: Any, kind: str) -> None:
    rate = warmup(keras_pair(kind)[0], 1000)
    before, at, after = (float(rate(step)) for step in (999, 1000, 1001))
    np.testing.assert_allclose([before, after], [at, at], rtol=2e-3, atol=1e-9)
    assert rate.final == pytest.approx(at)


def test_a_variable_is_a_step_in_graph_and_under_xla() -> None:
    rate = LinearWarmup(keras_pair("cosine")[0], 10)
    step = keras.Variable(5, dtype="int64")
    for compiled in (False, True):
        np.testing.assert_allclose(tf.function(lambda: rate(step), jit_compile=compiled)(), rate(5), rtol=1e-5)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_keras_can_save_and_load_a_warmup(kind: str) -> None:
    for warmup in (LinearWarmup(keras_pair(kind)[0], 10, 0.1), PolynomialWarmup(keras_pair(kind)[0], 10, 2.0)):
        loaded: Any = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(warmup))
        assert [float(loaded(step)) for step in STEPS] == [float(warmup(step)) for step in STEPS]
