"""From config to learning rate: each schedule and warm-up beside what Model Garden makes of the same numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.modeling.optimization import ExponentialMovingAverage, OptimizerFactory
from official.modeling.optimization import OptimizationConfig as GardenConfig

from trainer_kit.config.registration import register_schedule
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.learning_rate import (
    ConfiguredRates,
    add_learning_rate_factor,
    create_learning_rate,
    current_learning_rate,
    learning_rate_factors,
)
from trainer_kit.optimizers.rate_schedules import OneCycle

STEPS = (0, 1, 4, 5, 6, 19, 20, 21, 49, 50, 51, 99, 100, 101, 1000)

SCHEDULES: dict[str, dict[str, Any]] = {
    "stepwise": {"boundaries": [5, 20, 50], "values": [0.4, 0.3, 0.2, 0.1]},
    "exponential": {"initial_learning_rate": 0.4, "decay_steps": 20, "decay_rate": 0.9},
    "polynomial": {"initial_learning_rate": 0.4, "decay_steps": 50, "end_learning_rate": 0.01, "power": 2.0},
    "cosine": {"initial_learning_rate": 0.4, "decay_steps": 100, "alpha": 0.1},
    "power": {"initial_learning_rate": 0.4, "power": -0.5},
    "power_linear": {"initial_learning_rate": 0.4, "total_decay_steps": 100, "linear_decay_fraction": 0.5},
    "power_with_offset": {"initial_learning_rate": 0.4, "offset": 20, "pre_offset_learning_rate": 0.3},
    "step_cosine_with_offset": {"boundaries": [0, 50, 2000], "values": [0.4, 0.1, 0.0]},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SCHEDULES},
    "stepwise, offset": ("stepwise", {"offset": 5}),
    "exponential, offset": ("exponential", {"offset": 5}),
    "exponential, staircase": ("exponential", {"staircase": True}),
    "polynomial, offset": ("polynomial", {"offset": 5}),
    "polynomial, cycle": ("polynomial", {"cycle": True}),
    "cosine, offset": ("cosine", {"offset": 5}),
    "power_linear, offset": ("power_linear", {"offset": 5}),
    "step_cosine_with_offset, offset": ("step_cosine_with_offset", {"offset": 5}),
}
WARMUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"type": "linear", "linear": {"warmup_steps": 20, "warmup_learning_rate": 0.01}},
    "polynomial": {"type": "polynomial", "polynomial": {"warmup_steps": 20, "power": 2.0}},
}


def both(schedule: dict[str, Any], warmup: dict[str, Any]) -> tuple[Any, Any]:
    """The learning rates that we and Model Garden make of the same config."""
    values = {"optimizer": {"type": "sgd"}, "learning_rate": schedule, "warmup": warmup}
    theirs = OptimizerFactory(GardenConfig(values)).build_learning_rate()
    return create_learning_rate(OptimizationConfig(**values)), theirs


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_equal_those_of_model_garden(variant: str, warmup: str) -> None:
    kind, changes = VARIANTS[variant]
    ours, theirs = both({"type": kind, kind: {**SCHEDULES[kind], **changes}}, WARMUPS[warmup])
    expected = [float(theirs(tf.constant(step, tf.int64))) for step in STEPS]
    given = [float(ours(tf.constant(step, tf.int64))) for step in STEPS]
    np.testing.assert_allclose(given, expected, rtol=5e-6, atol=1e-8)


OF_KERAS: dict[str, tuple[dict[str, Any], Any]] = {
    "cosine_restarts": (
        {"initial_learning_rate": 0.4, "first_decay_steps": 20, "t_mul": 1.5, "m_mul": 0.8, "alpha": 0.1},
        keras.optimizers.schedules.CosineDecayRestarts(0.4, 20, 1.5, 0.8, 0.1),
    ),
    "inverse_time": (
        {"initial_learning_rate": 0.4, "decay_steps": 20, "decay_rate": 0.9},
        keras.optimizers.schedules.InverseTimeDecay(0.4, 20, 0.9),
    ),
    "inverse_time staircase": (
        {"initial_learning_rate": 0.4, "decay_steps": 20, "decay_rate": 0.9, "staircase": True},
        keras.optimizers.schedules.InverseTimeDecay(0.4, 20, 0.9, staircase=True),
    ),
    "one_cycle": ({"max_learning_rate": 0.4, "total_steps": 100}, OneCycle(0.4, 100)),
    "one_cycle linear": (
        {"max_learning_rate": 0.4, "total_steps": 60, "pct_start": 0.5, "rise": "linear", "final_div_factor": 10.0},
        OneCycle(0.4, 60, 0.5, "linear", final_div_factor=10.0),
    ),
}


@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("case", OF_KERAS)
def test_schedules_that_model_garden_lacks_have_all_their_fields(case: str, offset: int) -> None:
    fields, wanted = OF_KERAS[case]
    kind = case.split()[0]
    section = {"type": kind, kind: {**fields, "offset": offset}}
    ours: Any = create_learning_rate(OptimizationConfig(learning_rate=section))  # type: ignore[arg-type]
    expected = [float(wanted(max(step - offset, 0))) for step in STEPS]
    assert np.all(np.isfinite(expected))
    np.testing.assert_allclose([float(ours(tf.constant(step, tf.int64))) for step in STEPS], expected, rtol=1e-6)


def test_every_schedule_has_a_case() -> None:
    assert {*SCHEDULES, *(case.split()[0] for case in OF_KERAS), "constant"} == set(LrConfig.branches())


def test_a_constant_is_a_float_and_with_a_warmup_a_schedule() -> None:
    constant = {"type": "constant", "constant": {"learning_rate": 0.25}}
    assert both(constant, {})[0] == 0.25
    assert isinstance(both(constant, {})[0], float)
    ours, theirs = both(constant, WARMUPS["linear"])
    assert [float(ours(s)) for s in STEPS] == pytest.approx([float(theirs(s)) for s in STEPS])


def test_stepwise_without_a_boundary_is_its_one_value() -> None:
    schedule = {"type": "stepwise", "stepwise": {"boundaries": [], "values": [0.3]}}
    assert create_learning_rate(OptimizationConfig(learning_rate=schedule)) == 0.3


def test_no_schedule_is_an_error_that_names_them() -> None:
    with pytest.raises(UsageError, match=r"learning_rate\.type to one of constant, .*step_cosine_with_offset"):
        create_learning_rate(OptimizationConfig())


COSINE = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "cosine", "cosine": {"initial_learning_rate": 0.4, "decay_steps": 100}},
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


def test_the_current_rate_follows_a_changed_variable() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    rate = tf.function(lambda: current_learning_rate(optimizer, step=7))
    assert float(rate()) == 0.5
    optimizer.learning_rate = 0.125
    assert float(rate()) == 0.125


def test_an_object_with_nothing_but_a_rate_has_a_current_rate() -> None:
    class Plain:
        learning_rate = 0.75

    assert float(current_learning_rate(Plain())) == 0.75
    with pytest.raises(UsageError, match="object has no learning_rate"):
        current_learning_rate(object())


def test_an_optimizer_that_consists_of_several_has_their_rates() -> None:
    class Composite:
        optimizers = (keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.25))

    assert {name: float(rate) for name, rate in current_learning_rate(Composite()).items()} == {"0": 0.5, "1": 0.25}


@pytest.mark.parametrize("rate", [0.5, keras.optimizers.schedules.CosineDecay(0.5, 10)], ids=["constant", "schedule"])
def test_factors_multiply_the_rate_of_a_traced_function(rate: Any) -> None:
    optimizer, variable = keras.optimizers.SGD(rate), keras.Variable(1.0)
    optimizer.build([variable])
    for name in ("one", "other"):
        add_learning_rate_factor(optimizer, name)
    update = tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]))
    rates = tf.function(lambda: current_learning_rate(optimizer))
    for values in ((1.0, 0.5), (0.5, 0.25)):
        for factor, value in zip(learning_rate_factors(optimizer).values(), values, strict=True):
            factor.assign(value)
        configured = float(rate(optimizer.iterations) if callable(rate) else rate)
        found, before = float(rates()), float(variable)
        update()
        assert found == pytest.approx(configured * values[0] * values[1])
        assert before - float(variable) == pytest.approx(found)


def test_what_has_no_learning_rate_of_keras_3_has_no_factor() -> None:
    with pytest.raises(UsageError, match="object has no learning rate that a factor could multiply"):
        add_learning_rate_factor(object(), "one")


def _legacy(rate: Any) -> Any:
    optimizer = tf_keras.optimizers.legacy.Adam(rate)
    optimizer._create_all_weights([tf.Variable(1.0)])
    return optimizer


RATED: dict[str, Any] = {
    "Keras 3": keras.optimizers.Adam,
    "Keras 2": tf_keras.optimizers.Adam,
    "legacy": _legacy,
    "legacy, scaled": lambda rate: tf_keras.mixed_precision.LossScaleOptimizer(_legacy(rate)),
    "averaging": lambda rate: ExponentialMovingAverage(_legacy(rate)),
}


@pytest.mark.parametrize("kind", RATED)
def test_a_changed_rate_in_the_config_wins(kind: str) -> None:
    for configured, found in ((0.5, 0.25), (0.75, 0.75)):
        before = ConfiguredRates(RATED[kind](0.5)).state()
        optimizer = RATED[kind](configured)
        rates = ConfiguredRates(optimizer)
        optimizer.learning_rate = 0.25  # as it was restored
        rates.restore(before)
        assert float(current_learning_rate(optimizer)) == found
        rates.restore(None)  # by a checkpoint that tells no rates
        assert float(current_learning_rate(optimizer)) == found


def test_schedules_and_what_has_no_rate_are_left_alone() -> None:
    schedule = tf_keras.optimizers.schedules.CosineDecay(0.5, 10)
    for optimizer in (tf_keras.optimizers.Adam(schedule), tf_keras.optimizers.legacy.Adam(schedule), None, object()):
        rates = ConfiguredRates(optimizer)
        assert rates.state() == {}
        rates.restore({"": 0.5})


@pytest.mark.parametrize(
    "built",
    [lambda step: 0.1 * tf.cast(step, tf.float64), keras.optimizers.schedules.PolynomialDecay(0.0, 10, 1.0)],
    ids=["a function of the step", "a Keras schedule"],
)
def test_a_registered_schedule_gives_rates_and_takes_a_warmup(built: Any) -> None:
    register_schedule("ramp")(lambda config: built)
    try:
        warmup = {"type": "linear", "linear": {"warmup_steps": 4}}
        config = OptimizationConfig(learning_rate={"type": "ramp"}, warmup=warmup)  # type: ignore[arg-type]
        rate = create_learning_rate(config)
        values = [float(rate(tf.constant(step))) for step in (0, 2, 4, 6)]
        np.testing.assert_allclose(values, [0.0, 0.2, 0.4, 0.6], rtol=1e-6)
        optimizer = create_optimizer(config.replace(optimizer={"type": "sgd"}))
        assert float(current_learning_rate(optimizer, step=6)) == pytest.approx(0.6)
    finally:
        del LrConfig.registry._entries["ramp"]


def test_a_registered_schedule_that_is_none_is_refused() -> None:
    register_schedule("broken")(lambda config: "fast")
    try:
        with pytest.raises(UsageError, match="registered schedule 'broken' built 'fast'; return a keras LearningRateS"):
            create_learning_rate(OptimizationConfig(learning_rate={"type": "broken"}))  # type: ignore[arg-type]
    finally:
        del LrConfig.registry._entries["broken"]
