"""Each optimizer's first steps, compared with formulas in NumPy; what the factory wraps and refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizers import OptimizerConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import Clipping, apply_gradients
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer

RATE = 0.1
START = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.5]])
GRADIENTS = (
    np.array([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]),
    np.array([[-0.3, 0.1, 0.2], [0.1, -0.4, 0.2]]),
    np.array([[0.2, 0.2, -0.1], [0.0, 0.3, 0.1]]),
)
Reference = Callable[..., np.ndarray]


def sgd(w: np.ndarray, gradients: Iterable[np.ndarray], momentum: float = 0.0, nesterov: bool = False) -> np.ndarray:
    velocity = np.zeros_like(w)
    for g in gradients:
        velocity = momentum * velocity - RATE * g
        w = w + (momentum * velocity - RATE * g if nesterov else velocity)
    return w


def adam(
    w: np.ndarray,
    gradients: Iterable[np.ndarray],
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    weight_decay_rate: float = 0.0,
) -> np.ndarray:
    m, v, largest = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay_rate * w
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        largest = np.maximum(largest, v)
        alpha = RATE * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        w = w - alpha * m / (np.sqrt(largest if amsgrad else v) + epsilon)
    return w


def adamw(w: np.ndarray, gradients: Iterable[np.ndarray], gradient_clip_norm: float = 1.0, **fields: Any) -> np.ndarray:
    bound = gradient_clip_norm or np.inf
    return adam(w, [g * min(1.0, bound / np.linalg.norm(g)) for g in gradients], **fields)


def lamb(w: np.ndarray, gradients: Iterable[np.ndarray], weight_decay_rate: float = 0.0) -> np.ndarray:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay_rate * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        w = w - RATE * np.linalg.norm(w) / np.linalg.norm(update) * update
    return w


def rmsprop(
    w: np.ndarray, gradients: Iterable[np.ndarray], rho: float = 0.9, momentum: float = 0.0, centered: bool = False
) -> np.ndarray:
    square, mean, velocity = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for g in gradients:
        square, mean = rho * square + (1 - rho) * g**2, rho * mean + (1 - rho) * g
        variance = square - mean**2 if centered else square
        velocity = momentum * velocity + RATE * g / np.sqrt(variance + 1e-7)
        w = w - velocity
    return w


def adagrad(w: np.ndarray, gradients: Iterable[np.ndarray], initial_accumulator_value: float = 0.1) -> np.ndarray:
    total = np.full_like(w, initial_accumulator_value)
    for g in gradients:
        total = total + g**2
        w = w - RATE * g / np.sqrt(total + 1e-7)
    return w


def adafactor(
    w: np.ndarray, gradients: Iterable[np.ndarray], decay_rate: float = 0.8, clipping_threshold: float = 1.0
) -> np.ndarray:
    rows, columns = np.zeros(w.shape[0]), np.zeros(w.shape[1])
    for t, g in enumerate(gradients, start=1):
        keep = 1 - t**-decay_rate
        rows = keep * rows + (1 - keep) * np.mean(g**2 + 1e-30, axis=1)
        columns = keep * columns + (1 - keep) * np.mean(g**2 + 1e-30, axis=0)
        update = g / np.sqrt(np.outer(rows / rows.mean(), columns))
        update /= max(1.0, float(np.sqrt(np.mean(update**2))) / clipping_threshold)
        w = w - max(1e-3, float(np.sqrt(np.mean(w**2)))) * min(RATE, 1 / np.sqrt(t)) * update
    return w


CASES: dict[str, tuple[Reference, dict[str, Any]]] = {
    "sgd": (sgd, {}),
    "sgd momentum": (sgd, {"momentum": 0.9}),
    "sgd nesterov": (sgd, {"momentum": 0.9, "nesterov": True}),
    "adam": (adam, {}),
    "adam other values": (adam, {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}),
    "adam amsgrad": (adam, {"amsgrad": True, "beta_2": 0.5}),
    "adamw": (adamw, {"weight_decay_rate": 0.05}),
    "adamw tight clip": (adamw, {"weight_decay_rate": 0.05, "gradient_clip_norm": 0.3, "epsilon": 0.1}),
    "adamw no clip": (adamw, {"gradient_clip_norm": 0.0}),
    "lamb": (lamb, {}),
    "lamb decay": (lamb, {"weight_decay_rate": 0.05}),
    "rmsprop": (rmsprop, {}),
    "rmsprop centered momentum": (rmsprop, {"centered": True, "momentum": 0.5, "rho": 0.7}),
    "adagrad": (adagrad, {}),
    "adagrad other start": (adagrad, {"initial_accumulator_value": 0.5}),
    "adafactor": (adafactor, {}),
    "adafactor other values": (adafactor, {"decay_rate": 0.5, "clipping_threshold": 0.4}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_follow_the_formula(case: str, optimization: Callable[..., OptimizationConfig]) -> None:
    reference, fields = CASES[case]
    optimizer = create_optimizer(optimization(case.split()[0], RATE, **fields))
    weights = keras.Variable(START, dtype="float32")
    for gradient in GRADIENTS:
        apply_gradients(optimizer, [(tf.constant(gradient, tf.float32), weights)])
    np.testing.assert_allclose(weights.numpy(), reference(START, GRADIENTS, **fields), rtol=2e-5, atol=2e-6)


def test_every_type_of_the_config_has_a_case() -> None:
    assert {case.split()[0] for case in CASES} == set(OptimizerConfig.branches())


def test_keras_own_clipping_is_left_out(optimization: Callable[..., OptimizationConfig]) -> None:
    optimizer = create_optimizer(optimization("adam", global_clipnorm=0.5))
    assert (optimizer.global_clipnorm, optimizer.clipnorm, optimizer.clipvalue) == (None, None, None)
    assert optimizer.clipping == Clipping(global_clipnorm=0.5)


def test_the_name_of_the_config_is_that_of_the_optimizer(optimization: Callable[..., OptimizationConfig]) -> None:
    assert create_optimizer(optimization("lamb")).name == "LAMB"
    assert create_optimizer(optimization("sgd", name="inner")).iterations.path == "inner/iteration"


def test_no_optimizer_is_an_error_that_names_them() -> None:
    with pytest.raises(UsageError, match=r"to one of sgd, adam, adamw, lamb, rmsprop, adagrad, adafactor"):
        create_optimizer(OptimizationConfig())


@pytest.mark.parametrize("dtype", ["float16", "mixed_float16"])
@pytest.mark.parametrize("scale", [None, "dynamic", 128.0])
def test_float16_gets_a_loss_scale(dtype: str, scale: Any, optimization: Callable[..., OptimizationConfig]) -> None:
    optimizer = create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype, loss_scale=scale)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert optimizer.changes == (scale != 128.0)
    assert float(optimizer.dynamic_scale.numpy()) == (128.0 if scale == 128.0 else 2.0**15)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "mixed_bfloat16"])
def test_other_precisions_ignore_a_loss_scale_with_a_warning(
    dtype: str | None, optimization: Callable[..., OptimizationConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer_kit.optimizers.factory"):
        assert type(create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype)) is keras.optimizers.SGD
        assert not caplog.records
        create_optimizer(optimization("sgd"), mixed_precision_dtype=dtype, loss_scale="dynamic")
    assert "loss_scale=dynamic is not used: it is for float16" in caplog.text


@pytest.mark.parametrize("scale", ["fixed", 0.0, -2.0, float("nan"), float("inf"), True])
def test_a_loss_scale_that_cannot_be_is_refused(scale: Any, optimization: Callable[..., OptimizationConfig]) -> None:
    with pytest.raises(UsageError, match="give 'dynamic' or a number above 0"):
        create_optimizer(optimization("sgd"), mixed_precision_dtype="float16", loss_scale=scale)


@tk.configclass
class ScaledConfig(tk.BaseOptimizerConfig):
    """The optimizer of these tests, which makes short or long steps.

    Attributes:
      scale: The factor of each step.
    """

    scale: float = 1.0


@pytest.fixture
def scaled() -> Iterator[str]:
    """The name of an optimizer that a user has registered."""
    name = "scaled"

    @tk.register_optimizer(name, ScaledConfig)
    def build(config: ScaledConfig, learning_rate: Any) -> Any:
        """Makes short or long steps."""
        return keras.optimizers.SGD(config.scale * learning_rate) if config.scale > 0 else None

    yield name
    del OptimizerConfig.registry._entries[name]


def _registered(name: str, scale: float, **clipping: float) -> OptimizationConfig:
    section = {"type": name, name: {"scale": scale, **clipping}}
    return OptimizationConfig(optimizer=section, learning_rate={"type": "constant"})  # type: ignore[arg-type]


def test_a_registered_optimizer_is_built_from_its_section(scaled: str) -> None:
    optimizer = create_optimizer(_registered(scaled, 0.5, clipvalue=2.0))
    assert optimizer.clipping == Clipping(clipvalue=2.0)
    weights = keras.Variable([1.0, 1.0])
    apply_gradients(optimizer, [(tf.constant([3.0, -0.1]), weights)])
    np.testing.assert_allclose(weights.numpy(), [0.9, 1.005], rtol=1e-6)  # 3.0 is clipped to 2.0


def test_a_registered_builder_has_to_return_an_optimizer(scaled: str) -> None:
    with pytest.raises(
        UsageError, match=r"registered optimizer 'scaled' built a .*NoneType; return an optimizer of Ker"
    ):
        create_optimizer(_registered(scaled, -1.0))
