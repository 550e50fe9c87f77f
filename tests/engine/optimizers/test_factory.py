"""Each optimizer's first steps against NumPy, and what the factory wraps and refuses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import optimization, restore_registries
from tests.engine.optimizers import numpy_optimizers
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import build_optimizers, create_optimizer
from trainer_kit.optimizers.gradients import Clipping, apply_gradients
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer

START = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.5]])
GRADIENTS = (
    np.random.default_rng(7).normal(0.0, 0.3, (10, 2, 3)).astype(np.float32).astype(np.float64)
)

# The first word is the type.
OF_KERAS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam": {},
    "Adam other values": {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3},
    "Adam amsgrad": {"amsgrad": True, "beta_2": 0.5},
    "AdamW": {"weight_decay_rate": 0.05},
    "AdamW tight clip": {"weight_decay_rate": 0.05, "gradient_clip_norm": 0.3, "epsilon": 0.1},
    "AdamW no clip": {"gradient_clip_norm": 0.0},
    "Lamb": {},
    "Lamb decay": {"weight_decay_rate": 0.05},
    "RMSprop": {},
    "RMSprop centered momentum": {"centered": True, "momentum": 0.5, "rho": 0.7},
    "Adagrad": {},
    "Adagrad other start": {"initial_accumulator_value": 0.5},
    "Nadam": {},
    "Nadam other values": {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3, "weight_decay": 0.05},
    "Adamax": {},
    "Adamax other values": {"beta_1": 0.8, "beta_2": 0.9, "weight_decay": 0.05},
    "Adadelta": {},
    "Adadelta other values": {"rho": 0.8, "epsilon": 1e-3, "weight_decay": 0.05},
    "Ftrl": {},
    "Ftrl penalties": {
        "l1_regularization_strength": 0.5,
        "l2_regularization_strength": 0.1,
        "beta": 0.2,
    },
    "Ftrl other values": {
        "learning_rate_power": -0.7,
        "initial_accumulator_value": 0.3,
        "l2_shrinkage_regularization_strength": 0.05,
        "weight_decay": 0.05,
    },
    "Lion": {},
    "Lion other values": {"beta_1": 0.7, "beta_2": 0.8, "weight_decay": 0.05},
    "Muon": {},
    "Muon other values": {
        "momentum": 0.8,
        "nesterov": False,
        "ns_steps": 3,
        "rms_rate": None,
        "weight_decay": 0.05,
    },
    "Muon by adam": {"exclude_layers": ("^weights",), "adam_weight_decay": 0.05},
}
BY_FORMULA: dict[str, dict[str, Any]] = {
    "adafactor": {},
    "adafactor other values": {"decay_rate": 0.5, "clipping_threshold": 0.4},
    "schedule_free_adamw": {},
    "schedule_free_adamw other values": {
        "beta_1": 0.8,
        "beta_2": 0.95,
        "warmup_steps": 4,
        "weight_decay": 0.05,
    },
}


@pytest.mark.parametrize("case", OF_KERAS)
def test_ten_steps_are_those_of_the_class_of_keras(case: str) -> None:
    name = case.split()[0]
    config = optimization(name.lower(), numpy_optimizers.RATE, **OF_KERAS[case])
    section = config.optimizer.get()
    kind = getattr(keras.optimizers, name)
    arguments = {
        each: getattr(section, each)
        for each in inspect.signature(kind).parameters
        if hasattr(section, each)
    }
    if hasattr(section, "weight_decay_rate"):
        arguments["weight_decay"] = section.weight_decay_rate
    if getattr(section, "gradient_clip_norm", 0.0):
        arguments["global_clipnorm"] = section.gradient_clip_norm

    ours = create_optimizer(config)
    theirs = kind(numpy_optimizers.RATE, **arguments)
    weights, expected = (keras.Variable(START, dtype="float32", name="weights") for _ in range(2))

    for gradient in GRADIENTS:
        apply_gradients(ours, [(tf.constant(gradient, tf.float32), weights)])
        theirs.apply([tf.constant(gradient, tf.float32)], [expected])

    np.testing.assert_allclose(weights.numpy(), expected.numpy(), rtol=2e-5, atol=2e-6)

    for slot, wanted in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(slot.numpy(), wanted.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", BY_FORMULA)
def test_ten_steps_follow_the_formula(case: str) -> None:
    kind = case.split()[0]
    fields = BY_FORMULA[case]
    optimizer = create_optimizer(optimization(kind, numpy_optimizers.RATE, **fields))
    weights = keras.Variable(START, dtype="float32", name="weights")

    for gradient in GRADIENTS:
        apply_gradients(optimizer, [(tf.constant(gradient, tf.float32), weights)])

    expected, expected_slots = getattr(numpy_optimizers, kind)(START, GRADIENTS, **fields)

    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-5, atol=2e-6)

    slots = optimizer.variables[2:]  # after iterations and learning rate
    for slot, wanted in zip(slots, expected_slots, strict=True):
        np.testing.assert_allclose(slot.numpy(), wanted, rtol=2e-5, atol=2e-6)


def test_every_type_of_the_config_has_a_case() -> None:
    tested = {case.split()[0].lower() for case in (*OF_KERAS, *BY_FORMULA)}
    assert tested | {"lars"} == set(OptimizerConfig.branches())  # test_lars.py


@pytest.mark.parametrize("kind", OptimizerConfig.branches())
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keras_can_save_and_load_an_optimizer_with_its_fields(kind: str, dtype: str) -> None:
    fields = OptimizerConfig(type=kind).get()  # type: ignore[arg-type]
    rule = {}
    if hasattr(fields, "exclude_from_weight_decay"):
        rule["exclude_from_weight_decay"] = ("bias",)
    optimizer = create_optimizer(optimization(kind, **rule), mixed_precision_dtype=dtype)

    loaded: Any = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))

    assert type(loaded) is type(optimizer)
    assert loaded.get_config() == optimizer.get_config()


def test_keras_own_clipping_is_left_out() -> None:
    optimizer = create_optimizer(optimization("adam", global_clipnorm=0.5))

    assert optimizer.global_clipnorm is None
    assert optimizer.clipnorm is None
    assert optimizer.clipvalue is None
    assert optimizer.clipping == Clipping(global_clipnorm=0.5)


def test_the_name_of_the_config_is_that_of_the_optimizer() -> None:
    assert create_optimizer(optimization("lamb")).name == "LAMB"
    assert create_optimizer(optimization("sgd", name="inner")).iterations.path == "inner/iteration"


@pytest.mark.parametrize("dtype", ["float16", "mixed_float16"])
@pytest.mark.parametrize("scale", [None, "dynamic", 128.0])
def test_float16_gets_a_loss_scale(dtype: str, scale: Any) -> None:
    optimizer = create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype, loss_scale=scale)

    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.is_dynamic == (scale != 128.0)
    assert float(optimizer.dynamic_scale.numpy()) == (128.0 if scale == 128.0 else 2.0**15)


def test_a_policy_that_a_task_has_set_gets_a_loss_scale() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = create_optimizer(optimization("sgd"))
        other = create_optimizer(optimization("sgd"), mixed_precision_dtype="bfloat16")
    finally:
        keras.config.set_dtype_policy("float32")

    assert isinstance(optimizer, LossScaleOptimizer)
    assert not isinstance(other, LossScaleOptimizer)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "mixed_bfloat16"])
def test_other_precisions_ignore_a_loss_scale_with_a_warning(
    dtype: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer_kit.optimizers.factory"):
        assert (
            type(create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype))
            is keras.optimizers.SGD
        )
        assert not caplog.records
        create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype, loss_scale="dynamic")

    assert "loss_scale=dynamic is not used" in caplog.text


@pytest.mark.parametrize("scale", ["fixed", 0.0, -2.0, float("nan"), float("inf"), True])
def test_a_loss_scale_that_cannot_be_is_refused(scale: Any) -> None:
    with pytest.raises(UsageError):
        create_optimizer(optimization("sgd"), mixed_precision_dtype="float16", loss_scale=scale)


@tk.configclass
class ScaledConfig(tk.BaseOptimizerConfig):
    """The optimizer of these tests, which makes short or long steps.

    Attributes:
      scale: The factor of each step.
    """

    scale: float = 1.0


@pytest.fixture
def scaled_optimizer() -> Iterator[str]:
    """The name of an optimizer that a user has registered."""
    with restore_registries(OptimizerConfig.registry):

        @tk.register_optimizer("scaled", ScaledConfig)
        def build(config: ScaledConfig, learning_rate: Any) -> Any:
            """Makes short or long steps."""
            if config.scale <= 0:
                return None
            return keras.optimizers.SGD(config.scale * learning_rate)

        yield "scaled"


def _build_config(name: str, scale: float, **clipping: float) -> OptimizationConfig:
    section = {"type": name, name: {"scale": scale, **clipping}}
    return OptimizationConfig(optimizer=section, learning_rate={"type": "constant"})  # type: ignore[arg-type]


def test_a_registered_optimizer_is_built_from_its_section(scaled_optimizer: str) -> None:
    optimizer = create_optimizer(_build_config(scaled_optimizer, 0.5, clipvalue=2.0))

    assert optimizer.clipping == Clipping(clipvalue=2.0)

    weights = keras.Variable([1.0, 1.0])

    apply_gradients(optimizer, [(tf.constant([3.0, -0.1]), weights)])

    np.testing.assert_allclose(weights.numpy(), [0.9, 1.005], rtol=1e-6)  # 3.0 is clipped to 2.0


def test_a_registered_builder_has_to_return_an_optimizer(scaled_optimizer: str) -> None:
    with pytest.raises(UsageError):
        create_optimizer(_build_config(scaled_optimizer, -1.0))


def test_optimizers_get_their_slots_before_the_first_step() -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizers = {
        "a": create_optimizer(optimization("adam")),
        "b": create_optimizer(optimization("adam")),
    }

    build_optimizers(optimizers, [variable])

    assert all(optimizer.built for optimizer in optimizers.values())
