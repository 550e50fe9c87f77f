"""LARS beside Model Garden's class."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import optimization
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.lars import Lars
from trainer_kit.optimizers.weight_decay import DecayRule

VALUES = {
    "kernel": np.array([[1.0, -2.0], [0.5, 3.0]]),
    "zeros": np.zeros(2),
    "bias": np.array([0.5, 1.0]),
}


@pytest.mark.parametrize("adapted", [True, False], ids=["all adapted", "bias not adapted"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("classic", [False, True], ids=["popular", "classic"])
def test_values_equal_those_of_model_garden(classic: bool, nesterov: bool, adapted: bool) -> None:
    same: dict[str, Any] = {
        "momentum": 0.8,
        "eeta": 0.05,
        "nesterov": nesterov,
        "classic_momentum": classic,
    }
    same |= {"weight_decay_rate": 0.1, "exclude_from_weight_decay": ("bias",)}
    same |= {"exclude_from_layer_adaptation": ("nothing",) if adapted else ("bias",)}
    garden_lars = pytest.importorskip("official.modeling.optimization.lars")
    ours = create_optimizer(optimization("lars", 0.3, **same))
    theirs = garden_lars.LARS(0.3, **same)
    variables = [
        keras.Variable(value, dtype="float32", name=name) for name, value in VALUES.items()
    ]
    garden = [tf.Variable(value, dtype=tf.float32, name=name) for name, value in VALUES.items()]

    for step in range(1, 6):
        gradients = [tf.constant(0.1 * step - value, tf.float32) for value in VALUES.values()]
        ours.apply_gradients(list(zip(gradients, variables, strict=True)))
        theirs.apply_gradients(list(zip(gradients, garden, strict=True)))

    for variable, wanted in zip(variables, garden, strict=True):
        np.testing.assert_allclose(variable.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    weights = keras.Variable([1.0, 2.0])

    Lars(0.3).apply_gradients([(tf.zeros(2), weights)])

    assert weights.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_pattern_that_finds_nothing_is_named_once(
    weight_decay: float, caplog: pytest.LogCaptureFixture
) -> None:
    rule = DecayRule(exclude=("biass",))
    Lars(0.3, weight_decay=weight_decay, decay_rule=rule, adaptation_rule=rule).build(
        [keras.Variable(1.0, name="bias")]
    )

    subject = "weight decay" if weight_decay else "layer adaptation"

    assert caplog.messages == [f"{subject}: the pattern 'biass' matches none of the variables bias"]
