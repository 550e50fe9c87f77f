"""Which variables decay: rules alone, and each optimizer that has weight decay."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import optimization
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients
from trainer_kit.optimizers.per_variable import variable_path


def build_layers(library: Any) -> Any:
    """Returns a model of a dense layer and a layer normalization, whose variables are all ones."""
    layers = [
        library.layers.Dense(2, name="dense", kernel_initializer="ones", bias_initializer="ones"),
        library.layers.LayerNormalization(name="layer_norm", beta_initializer="ones"),
    ]
    model = library.Sequential(layers, name="net")
    model.build((None, 3))
    return model


def find_decayed(optimizer: Any, model: Any) -> set[str]:
    """Returns the names of the variables, all ones, that a step with zero gradients changes."""
    variables = model.trainable_variables
    apply_gradients(optimizer, [(tf.zeros_like(tf.convert_to_tensor(v)), v) for v in variables])
    changed = {
        variable_path(v).removeprefix("net/") for v in variables if not np.all(np.asarray(v) == 1.0)
    }
    for variable in variables:
        variable.assign(np.ones(variable.shape))

    return changed


DECAYING: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay_rate": 0.5},
    "lamb": {"weight_decay_rate": 0.5},
    "lars": {"weight_decay_rate": 0.5},
    "nadam": {"weight_decay": 0.5},
    "adamax": {"weight_decay": 0.5},
    "adadelta": {"weight_decay": 0.5},
    "lion": {"weight_decay": 0.5},
    "muon": {"weight_decay": 0.5, "adam_weight_decay": 0.5},
    "schedule_free_adamw": {"weight_decay": 0.5},
}
RULES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all": ({}, {"dense/kernel", "dense/bias", "layer_norm/gamma", "layer_norm/beta"}),
    "by layer and by name": (
        {"exclude_from_weight_decay": ("layer_norm", "bias")},
        {"dense/kernel"},
    ),
    "anchored": (
        {"exclude_from_weight_decay": ("kernel$",)},
        {"dense/bias", "layer_norm/gamma", "layer_norm/beta"},
    ),
    "include wins": (
        {
            "exclude_from_weight_decay": ("layer_norm", "bias"),
            "include_in_weight_decay": ("norm/g",),
        },
        {"dense/kernel", "layer_norm/gamma"},
    ),
}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("kind", DECAYING)
def test_each_optimizer_leaves_excluded_variables_alone(kind: str, library: Any) -> None:
    if (kind, library) == ("muon", tf_keras):
        pytest.skip("muon is for models of Keras 3")
    fields = {**DECAYING[kind], "exclude_from_weight_decay": ("layer_norm/", "bias")}

    optimizer = create_optimizer(optimization(kind, **fields))

    assert find_decayed(optimizer, build_layers(library)) == {"dense/kernel"}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # with a loss scale around the optimizer
@pytest.mark.parametrize("rule", RULES)
def test_adamw_decays_what_the_patterns_say(rule: str, dtype: str, library: Any) -> None:
    fields, expected = RULES[rule]
    config = optimization("adamw", weight_decay_rate=0.5, **fields)

    optimizer = create_optimizer(config, mixed_precision_dtype=dtype)

    assert find_decayed(optimizer, build_layers(library)) == expected


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_adafactor_decays_only_what_is_included(library: Any) -> None:
    included = create_optimizer(
        optimization("adafactor", weight_decay=0.5, include_in_weight_decay="kernel")
    )
    everything = create_optimizer(optimization("adafactor", weight_decay=0.5))

    assert find_decayed(included, build_layers(library)) == {"dense/kernel"}
    assert len(find_decayed(everything, build_layers(library))) == 4


@pytest.mark.parametrize("kind", [*DECAYING, "adafactor"])
def test_without_weight_decay_zero_gradients_change_nothing(kind: str) -> None:
    fields: dict[str, Any] = {}
    if kind == "muon":
        fields = {"weight_decay": None, "adam_weight_decay": 0.0}

    optimizer = create_optimizer(optimization(kind, **fields))

    assert find_decayed(optimizer, build_layers(keras)) == set()


def test_muon_decays_what_adam_updates_by_a_rate_of_its_own() -> None:
    optimizer = create_optimizer(optimization("muon", weight_decay=0.0, adam_weight_decay=0.5))

    assert find_decayed(optimizer, build_layers(keras)) == {
        "dense/bias",
        "layer_norm/gamma",
        "layer_norm/beta",
    }


def test_a_pattern_that_finds_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = optimization(
        "adamw", weight_decay_rate=0.5, exclude_from_weight_decay=("LayerNorm", "bias")
    )

    with caplog.at_level(logging.WARNING, logger="trainer_kit.optimizers.weight_decay"):
        create_optimizer(config).build(build_layers(keras).trainable_variables)

    assert [record.getMessage() for record in caplog.records] == [
        "weight decay: the pattern 'LayerNorm' matches none of the variables "
        "net/dense/kernel, net/dense/bias, net/layer_norm/gamma, net/layer_norm/beta"
    ]
