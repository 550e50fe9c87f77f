"""Groups of variables with separate learning rates: optimizers, replicas, XLA."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import optimization, replicas, restore_registries
from tests.engine.optimizers.test_gradients import train
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients
from trainer_kit.optimizers.rate_groups import RateGroups

START = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.5]], np.float32)
GRADIENTS = np.random.default_rng(3).normal(0.0, 0.3, (5, 2, 3)).astype(np.float32)
PATHS = (
    "net/embedding/table",
    "net/block_1/kernel",
    "net/block_2/kernel",
    "net/block_2/bias",
    "net/head/kernel",
)


def multiply_rates(config: OptimizationConfig, **factors: float) -> OptimizationConfig:
    """Returns the config with a multiplier for each variable whose path contains the name."""
    groups = [{"variables": name, "multiplier": factor} for name, factor in factors.items()]
    return config.replace(learning_rate_multipliers=groups)


def move_variables(
    config: OptimizationConfig,
    *names: str,
    dtype: str | None = None,
    steps: int = 5,
    compiled: bool | None = False,
) -> list[np.ndarray]:
    """Returns variables of the given names, with equal values and gradients, after some steps.

    The steps are in a function. `compiled` is None: without one, which takes less time than a
    trace.
    """
    variables = [keras.Variable(START, name=name) for name in names]
    optimizer = create_optimizer(
        config, mixed_precision_dtype=dtype, loss_scale=1.0 if dtype else None
    )
    optimizer.build(variables)

    def step(gradient: tf.Tensor) -> None:
        apply_gradients(optimizer, [(gradient, variable) for variable in variables])

    run = step
    if compiled is not None:
        run = tf.function(step, jit_compile=compiled)
    for gradient in GRADIENTS[:steps]:
        run(tf.constant(gradient))

    return [variable.numpy() for variable in variables]


def test_the_first_multiplier_and_the_first_layer_count() -> None:
    config = OptimizationConfig(
        optimizer={"type": "sgd"},  # type: ignore[arg-type]
        learning_rate={"type": "constant"},  # type: ignore[arg-type]
        learning_rate_multipliers=[
            {"variables": "bias$", "multiplier": 2.0},
            {"variables": "block_2", "multiplier": 5.0},
        ],  # type: ignore[arg-type]
        layer_decay={"decay": 0.5, "layers": ["embedding", "block_1", "block_2"]},  # type: ignore[arg-type]
    )

    groups = RateGroups.from_config(config)

    assert [groups.factor(path) for path in PATHS] == [0.25, 0.5, 5.0, 2.0, 1.0]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_two_groups_move_by_the_ratio_of_their_rates(kind: str) -> None:
    encoder, head = move_variables(
        multiply_rates(optimization(kind), encoder=0.25), "encoder", "head", steps=1
    )

    np.testing.assert_allclose(START - encoder, 0.25 * (START - head), rtol=1e-4)
    assert np.all(encoder != START)


DECAY: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {},
    "adamw": {"weight_decay_rate": 0.2, "gradient_clip_norm": 0.0},
    "lamb": {"weight_decay_rate": 0.2},
    "rmsprop": {},
    "adagrad": {},
    "lars": {"weight_decay_rate": 0.2, "eeta": 0.1},
    "muon": {"weight_decay": 0.2},
}

# One loss scale is in front of each optimizer: these differ in how they decay weights, and in what
# a rate multiplies.
SCALED = ("sgd", "adamw", "lars", "muon", "schedule_free_adamw")


@pytest.mark.parametrize("kind", OptimizerConfig.branches())
def test_a_group_trains_as_an_optimizer_at_its_rate(kind: str) -> None:
    """Those of SCALED also in float16 and compiled: compilation takes most of the time."""
    make = functools.partial(optimization, kind, **DECAY.get(kind, {"weight_decay": 0.2}))
    groups = multiply_rates(make(0.1), encoder=0.5, frozen=0.0)
    half = move_variables(make(0.05), "encoder", compiled=None)
    full = move_variables(make(0.1), "encoder", compiled=None)
    expected = [*half, START, *full]
    dtypes = (None, "float16") if kind in SCALED else (None,)

    for dtype in dtypes:
        grouped = move_variables(
            groups, "encoder", "frozen", "head", dtype=dtype, compiled=dtype is not None
        )
        for weight, wanted in zip(grouped, expected, strict=True):
            np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)
        assert not np.allclose(grouped[0], grouped[2], rtol=1e-3)


def test_replicas_change_nothing() -> None:
    decayed = optimization("adamw", weight_decay_rate=0.1, epsilon=1e-3, global_clipnorm=0.3)
    config = multiply_rates(decayed, embeddings=0.1, bias=0.0)

    on_one_replica = train(replicas(1), lambda: create_optimizer(config))
    on_two_replicas = train(replicas(2), lambda: create_optimizer(config))

    for weight, wanted in zip(on_two_replicas, on_one_replica, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6, rtol=1e-6)


@pytest.fixture
def registered_optimizer() -> Iterator[str]:
    """The name of a user's optimizer that leaves the decay of all but the biases to Keras."""
    with restore_registries(OptimizerConfig.registry):

        @tk.register_optimizer("decayed_by_keras")
        def build(config: Any, learning_rate: Any) -> keras.Optimizer:
            optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=0.2)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        yield "decayed_by_keras"


def test_decay_of_a_registered_optimizer_has_the_groups_rate(registered_optimizer: str) -> None:
    config = multiply_rates(optimization(registered_optimizer, 0.1), encoder=0.5, frozen=0.0)
    grouped = move_variables(config, "encoder", "frozen", "head", "bias")
    half = optimization(registered_optimizer, 0.05)
    full = optimization(registered_optimizer, 0.1)
    expected = [*move_variables(half, "encoder"), START, *move_variables(full, "head", "bias")]

    for weight, wanted in zip(grouped, expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


def test_patterns_that_count_for_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    groups = RateGroups(multipliers=(("encodr", 0.1), ("block", 0.2), ("block_2", 0.3)))

    groups.warn_about_unused_patterns(PATHS)

    assert [record.getMessage() for record in caplog.records] == [
        f"learning rates: the pattern 'encodr' matches no variable; there are: {', '.join(PATHS)}",
        "learning rates: all variables of the pattern 'block_2' are those of patterns before it",
    ]

    caplog.clear()

    RateGroups(layers=(("embeding", 0.1),)).warn_about_unused_patterns(PATHS)

    assert caplog.messages == [
        "learning rates: the pattern 'embeding' matches no variable; there are: net/embedding/table"
    ]


def test_the_groups_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainer_kit.optimizers.rate_groups"):
        move_variables(multiply_rates(optimization("sgd"), head=0.1), "one", "two", "head", steps=0)

    assert caplog.messages == ["learning rates: 0.1 times for 1, 1 times for 2 of 3 variables"]
