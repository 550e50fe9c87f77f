"""The schedules that Keras does not have, compared with Model Garden's classes or with a formula in NumPy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from official.modeling.optimization import lr_schedule

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.rate_schedules import (
    OneCycle,
    PowerAndLinearDecay,
    PowerDecay,
    PowerDecayWithOffset,
    StepCosineDecay,
    WithOffset,
)

STEPS = (0, 1, 2, 3, 49, 50, 51, 89, 90, 91, 99, 100, 101, 500)

PAIRS = {
    "power": (PowerDecay(0.3, -0.5), lr_schedule.DirectPowerDecay(0.3, -0.5)),
    "power_linear": (
        PowerAndLinearDecay(0.3, 100, -0.5, 0.2),
        lr_schedule.PowerAndLinearDecay(0.3, 100, -0.5, 0.2),
    ),
    "power_linear without a line": (
        PowerAndLinearDecay(0.3, 100, -0.5, 0.0),
        lr_schedule.PowerAndLinearDecay(0.3, 100, -0.5, 0.0),
    ),
    "power_linear with offset": (
        WithOffset(PowerAndLinearDecay(0.3, 100, -0.5, 0.2), 40),
        lr_schedule.PowerAndLinearDecay(0.3, 100, -0.5, 0.2, offset=40),
    ),
    "power_with_offset": (
        PowerDecayWithOffset(0.3, -0.5, 50, 0.2),
        lr_schedule.PowerDecayWithOffset(0.3, -0.5, 50, 0.2),
    ),
    "power_with_offset, capped": (
        PowerDecayWithOffset(9.0, -0.5, 2, 0.2),
        lr_schedule.PowerDecayWithOffset(9.0, -0.5, 2, 0.2),
    ),
    "step_cosine": (
        StepCosineDecay([0, 50, 600], [0.4, 0.1, 0.02]),
        lr_schedule.StepCosineDecayWithOffset([0, 50, 600], [0.4, 0.1, 0.02]),
    ),
    "step_cosine with offset": (
        WithOffset(StepCosineDecay([0, 50, 600], [0.4, 0.1, 0.02]), 45),
        lr_schedule.StepCosineDecayWithOffset([0, 50, 600], [0.4, 0.1, 0.02], offset=45),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_equal_those_of_model_garden(name: str) -> None:
    ours, theirs = PAIRS[name]
    expected = [float(theirs(tf.constant(step, tf.int64))) for step in STEPS]
    assert np.all(np.isfinite(expected))
    np.testing.assert_allclose([float(ours(step)) for step in STEPS], expected, rtol=2e-6, atol=1e-9)


def one_cycle(step: float, pct_start: float, rise: str, div_factor: float, final_div_factor: float) -> float:
    """The 1cycle policy with 0.3 as the highest rate, over 100 steps."""
    step, peak, first = min(max(step, 0), 100), 100 * pct_start, 0.3 / div_factor
    if step <= peak:
        part = step / peak if peak else 1.0
        return float(first + (0.3 - first) * (part if rise == "linear" else (1 - np.cos(np.pi * part)) / 2))
    last = first / final_div_factor
    return float(last + (0.3 - last) * (1 + np.cos(np.pi * (step - peak) / (100 - peak))) / 2)


CYCLES = {
    "one_cycle": (0.3, "cosine", 25.0, 1e4),
    "one_cycle, linear": (0.25, "linear", 10.0, 2.0),
    "one_cycle without a rise": (0.0, "linear", 10.0, 2.0),
    "one_cycle without a fall": (1.0, "cosine", 10.0, 2.0),
}
SAVED: dict[str, Any] = {
    **{name: ours for name, (ours, _) in PAIRS.items()},
    **{name: OneCycle(0.3, 100, *values) for name, values in CYCLES.items()},
    "one_cycle with offset": WithOffset(OneCycle(0.3, 100), 40, waits=True),
}


@pytest.mark.parametrize("name", CYCLES)
def test_one_cycle_follows_its_formula(name: str) -> None:
    steps = (-5, 0, 1, 10, 25, 29, 30, 31, 50, 75, 99, 100, 101, 10**6)
    expected = [one_cycle(step, *CYCLES[name]) for step in steps]
    np.testing.assert_allclose([float(SAVED[name](step)) for step in steps], expected, rtol=1e-5, atol=1e-6 * 0.3)


@pytest.mark.parametrize("name", SAVED)
def test_graph_and_xla_give_the_eager_value_in_float32(name: str) -> None:
    schedule = SAVED[name]
    in_graph = tf.function(schedule, input_signature=[tf.TensorSpec((), tf.int64)])
    compiled = tf.function(schedule, input_signature=[tf.TensorSpec((), tf.int64)], jit_compile=True)
    for step in (0, 50, 95):
        step = tf.constant(step, tf.int64)
        assert in_graph(step).dtype == tf.float32
        np.testing.assert_allclose(in_graph(step), schedule(step), rtol=1e-6)
        np.testing.assert_allclose(compiled(step), schedule(step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", SAVED)
def test_keras_can_save_and_load_a_schedule(name: str) -> None:
    schedule = SAVED[name]
    loaded: Any = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(loaded) is type(schedule)
    assert [float(loaded(step)) for step in STEPS] == [float(schedule(step)) for step in STEPS]


def test_step_cosine_ends_at_its_last_value_not_at_nan() -> None:
    assert np.isnan(float(lr_schedule.StepCosineDecayWithOffset([0, 50], [0.4, 0.1])(60)))
    schedule = StepCosineDecay([0, 50], [0.4, 0.1])
    np.testing.assert_allclose([float(schedule(step)) for step in (49, 50, 51, 10**6)], [0.1003, 0.1, 0.1, 0.1], 1e-2)


def test_step_cosine_keeps_its_first_value_before_its_start() -> None:
    schedule = StepCosineDecay([100, 200], [0.4, 0.0])
    np.testing.assert_allclose([float(schedule(s)) for s in (0, 50, 100, 150, 200)], [0.4, 0.4, 0.4, 0.2, 0], atol=1e-7)


def test_step_cosine_of_one_value_is_constant() -> None:
    schedule = StepCosineDecay([0], [0.25])
    assert [float(schedule(step)) for step in (0, 1, 1000)] == [0.25] * 3


@pytest.mark.parametrize(("boundaries", "values"), [([], []), ([0, 5], [0.1]), ([0], [0.1, 0.2])])
def test_step_cosine_refuses_an_unequal_number_of_boundaries(boundaries: list[int], values: list[float]) -> None:
    with pytest.raises(UsageError, match="as many values as boundaries"):
        StepCosineDecay(boundaries, values)
