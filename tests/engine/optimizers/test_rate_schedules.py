"""From config to learning rate: schedules and warm-ups against Model Garden, Keras and formulas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import restore_registries
from trainer_kit.config.registration import register_schedule
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.learning_rate import create_learning_rate, current_learning_rate
from trainer_kit.optimizers.rate_schedules import StepCosineDecay

STEPS = (0, 1, 4, 5, 6, 19, 20, 21, 49, 50, 51, 99, 100, 101, 1000)
COSINE = {"initial_learning_rate": 0.4, "decay_steps": 100, "alpha": 0.1}
POLYNOMIAL = {
    "initial_learning_rate": 0.4,
    "decay_steps": 50,
    "end_learning_rate": 0.01,
    "power": 2.0,
}
POWER_LINEAR = {
    "initial_learning_rate": 0.4,
    "total_decay_steps": 100,
    "linear_decay_fraction": 0.5,
}
STEP_COSINE = {"boundaries": [0, 50, 2000], "values": [0.4, 0.1, 0.0]}

# The first word is the type.
OF_MODEL_GARDEN: dict[str, dict[str, Any]] = {
    "stepwise": {"boundaries": [5, 20, 50], "values": [0.4, 0.3, 0.2, 0.1]},
    "stepwise offset": {"boundaries": [5, 20, 50], "values": [0.4, 0.3, 0.2, 0.1], "offset": 5},
    "exponential": {"initial_learning_rate": 0.4, "decay_steps": 20, "decay_rate": 0.9},
    "exponential offset": {
        "initial_learning_rate": 0.4,
        "decay_steps": 20,
        "decay_rate": 0.9,
        "offset": 5,
    },
    "exponential staircase": {
        "initial_learning_rate": 0.4,
        "decay_steps": 20,
        "decay_rate": 0.9,
        "staircase": True,
    },
    "polynomial": POLYNOMIAL,
    "polynomial offset": {**POLYNOMIAL, "offset": 5},
    "polynomial cycle": {**POLYNOMIAL, "cycle": True},
    "cosine": COSINE,
    "cosine offset": {**COSINE, "offset": 5},
    "power": {"initial_learning_rate": 0.4, "power": -0.5},
    "power_linear": POWER_LINEAR,
    "power_linear offset": {**POWER_LINEAR, "offset": 5},
    "power_linear without a line": {**POWER_LINEAR, "linear_decay_fraction": 0.0},
    "power_with_offset": {
        "initial_learning_rate": 0.4,
        "offset": 20,
        "pre_offset_learning_rate": 0.3,
    },
    "power_with_offset capped": {
        "initial_learning_rate": 9.0,
        "offset": 2,
        "pre_offset_learning_rate": 0.2,
    },
    "step_cosine_with_offset": STEP_COSINE,
    "step_cosine_with_offset offset": {**STEP_COSINE, "offset": 5},
}
OF_KERAS: dict[str, tuple[dict[str, Any], Any]] = {
    "cosine_restarts": (
        {
            "initial_learning_rate": 0.4,
            "first_decay_steps": 20,
            "t_mul": 1.5,
            "m_mul": 0.8,
            "alpha": 0.1,
        },
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
}
CYCLES = {
    "one_cycle": {"pct_start": 0.3, "rise": "cosine", "div_factor": 25.0, "final_div_factor": 1e4},
    "one_cycle linear": {
        "pct_start": 0.25,
        "rise": "linear",
        "div_factor": 10.0,
        "final_div_factor": 2.0,
    },
    "one_cycle without a rise": {
        "pct_start": 0.0,
        "rise": "linear",
        "div_factor": 10.0,
        "final_div_factor": 2.0,
    },
    "one_cycle without a fall": {
        "pct_start": 1.0,
        "rise": "cosine",
        "div_factor": 10.0,
        "final_div_factor": 2.0,
    },
}
WARMUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"type": "linear", "linear": {"warmup_steps": 20, "warmup_learning_rate": 0.01}},
    "polynomial": {"type": "polynomial", "polynomial": {"warmup_steps": 20, "power": 2.0}},
    "polynomial root": {"type": "polynomial", "polynomial": {"warmup_steps": 10, "power": 0.5}},
}
SECTIONS = {
    **OF_MODEL_GARDEN,
    **{case: fields for case, (fields, _) in OF_KERAS.items()},
    **{
        case: {"max_learning_rate": 0.3, "total_steps": 100, **fields}
        for case, fields in CYCLES.items()
    },
    "one_cycle offset": {"max_learning_rate": 0.3, "total_steps": 100, "offset": 40},
    "constant": {"learning_rate": 0.25},
}
WARMED_UP = [
    *((case, "none") for case in SECTIONS if case != "constant"),
    *(("cosine", warmup) for warmup in WARMUPS),
]


def build_schedule_config(case: str, warmup: str = "none", **fields: Any) -> OptimizationConfig:
    """Returns the config of a case of SECTIONS, with more fields, and of a case of WARMUPS."""
    kind = case.split()[0]
    rate = {"type": kind, kind: {**SECTIONS[case], **fields}}
    return OptimizationConfig(optimizer={"type": "sgd"}, learning_rate=rate, warmup=WARMUPS[warmup])  # type: ignore[arg-type]


def test_every_schedule_of_the_config_has_a_case() -> None:
    assert {case.split()[0] for case in SECTIONS} == set(LrConfig.branches())


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("case", [*OF_MODEL_GARDEN, "constant"])
def test_rates_equal_those_of_model_garden(case: str, warmup: str) -> None:
    garden = pytest.importorskip("official.modeling.optimization")
    config = build_schedule_config(case, warmup)
    sections = {"optimizer": {"type": "sgd"}, "warmup": WARMUPS[warmup]}
    kind = case.split()[0]
    sections["learning_rate"] = {"type": kind, kind: SECTIONS[case]}
    ours = create_learning_rate(config)
    theirs = garden.OptimizerFactory(garden.OptimizationConfig(sections)).build_learning_rate()
    if (case, warmup) == ("constant", "none"):
        assert isinstance(ours, float)
        assert ours == 0.25
        return

    rates, expected = (
        [float(rate(tf.constant(step, tf.int64))) for step in STEPS] for rate in (ours, theirs)
    )

    np.testing.assert_allclose(rates, expected, rtol=5e-6, atol=1e-8)


@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("case", OF_KERAS)
def test_schedules_that_model_garden_lacks_equal_those_of_keras(case: str, offset: int) -> None:
    ours: Any = create_learning_rate(build_schedule_config(case, offset=offset))
    expected = [float(OF_KERAS[case][1](max(step - offset, 0))) for step in STEPS]

    np.testing.assert_allclose(
        [float(ours(tf.constant(step, tf.int64))) for step in STEPS], expected, rtol=1e-6
    )


def compute_one_cycle(
    step: float, pct_start: float, rise: str, div_factor: float, final_div_factor: float
) -> float:
    """Returns the rate of the 1cycle policy with 0.3 as the highest rate, over 100 steps."""
    step = min(max(step, 0), 100)
    peak = 100 * pct_start
    first = 0.3 / div_factor
    if step <= peak:
        part = step / peak if peak else 1.0
        return float(
            first + (0.3 - first) * (part if rise == "linear" else (1 - np.cos(np.pi * part)) / 2)
        )
    last = first / final_div_factor
    return float(last + (0.3 - last) * (1 + np.cos(np.pi * (step - peak) / (100 - peak))) / 2)


@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("case", CYCLES)
def test_one_cycle_follows_its_formula(case: str, offset: int) -> None:
    schedule: Any = create_learning_rate(build_schedule_config(case, offset=offset))
    steps = (-5, 0, 1, 10, 25, 29, 30, 31, 50, 75, 99, 100, 101, 10**6)
    expected = [compute_one_cycle(step, **CYCLES[case]) for step in steps]  # type: ignore[arg-type]

    np.testing.assert_allclose(
        [float(schedule(step + offset)) for step in steps], expected, rtol=1e-5, atol=3e-7
    )


@pytest.mark.parametrize(("case", "warmup"), WARMED_UP)
def test_graph_and_xla_give_the_eager_rate_in_float32(case: str, warmup: str) -> None:
    schedule: Any = create_learning_rate(build_schedule_config(case, warmup))
    in_graph = tf.function(schedule, input_signature=[tf.TensorSpec((), tf.int64)])
    compiled = tf.function(
        schedule, input_signature=[tf.TensorSpec((), tf.int64)], jit_compile=True
    )
    for step in (0, 5, 50, 95):
        step = tf.constant(step, tf.int64)
        assert in_graph(step).dtype == tf.float32
        np.testing.assert_allclose(in_graph(step), schedule(step), rtol=1e-6)
        np.testing.assert_allclose(compiled(step), schedule(step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("case", "warmup"), [*WARMED_UP, ("constant", "linear")])
def test_keras_can_save_and_load_a_schedule(case: str, warmup: str) -> None:
    schedule: Any = create_learning_rate(build_schedule_config(case, warmup))
    loaded: Any = keras.optimizers.schedules.deserialize(
        keras.optimizers.schedules.serialize(schedule)
    )

    assert type(loaded) is type(schedule)
    assert [float(loaded(step)) for step in STEPS] == [float(schedule(step)) for step in STEPS]


@pytest.mark.parametrize(
    ("boundaries", "values", "rates"),
    [
        # Here Model Garden's is NaN.
        ([0, 50], [0.4, 0.1], {49: 0.1003, 50: 0.1, 51: 0.1, 10**6: 0.1}),
        ([100, 200], [0.4, 0.0], {0: 0.4, 50: 0.4, 100: 0.4, 150: 0.2, 200: 0.0}),
        ([0], [0.25], {0: 0.25, 1: 0.25, 1000: 0.25}),
    ],
    ids=["ends at its last value", "begins with its first value", "one value is constant"],
)
def test_step_cosine_keeps_its_first_and_last_value(
    boundaries: list[int], values: list[float], rates: dict[int, float]
) -> None:
    schedule = StepCosineDecay(boundaries, values)

    np.testing.assert_allclose(
        [float(schedule(step)) for step in rates], [*rates.values()], rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize(("boundaries", "values"), [([], []), ([0, 5], [0.1]), ([0], [0.1, 0.2])])
def test_step_cosine_refuses_an_unequal_number_of_boundaries(
    boundaries: list[int], values: list[float]
) -> None:
    with pytest.raises(UsageError):
        StepCosineDecay(boundaries, values)


def test_stepwise_without_a_boundary_is_its_one_value() -> None:
    schedule = {"type": "stepwise", "stepwise": {"boundaries": [], "values": [0.3]}}
    assert create_learning_rate(OptimizationConfig(learning_rate=schedule)) == 0.3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "built",
    [
        lambda step: 0.1 * tf.cast(step, tf.float64),
        keras.optimizers.schedules.PolynomialDecay(0.0, 10, 1.0),
    ],
    ids=["a function of the step", "a Keras schedule"],
)
def test_a_registered_schedule_gives_rates_and_takes_a_warmup(built: Any) -> None:
    warmup = {"type": "linear", "linear": {"warmup_steps": 4}}

    with restore_registries(LrConfig.registry):
        register_schedule("ramp")(lambda config: built)
        config = OptimizationConfig(learning_rate={"type": "ramp"}, warmup=warmup)  # type: ignore[arg-type]
        rate: Any = create_learning_rate(config)
        optimizer = create_optimizer(config.replace(optimizer={"type": "sgd"}))

    values = [float(rate(tf.constant(step))) for step in (0, 2, 4, 6)]

    np.testing.assert_allclose(values, [0.0, 0.2, 0.4, 0.6], rtol=1e-6)
    assert float(current_learning_rate(optimizer, step=6)) == pytest.approx(0.6)


def test_a_registered_schedule_that_is_none_is_refused() -> None:
    with restore_registries(LrConfig.registry), pytest.raises(UsageError):
        register_schedule("broken")(lambda config: "fast")
        create_learning_rate(OptimizationConfig(learning_rate={"type": "broken"}))  # type: ignore[arg-type]
