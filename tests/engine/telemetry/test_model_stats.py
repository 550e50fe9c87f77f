from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.telemetry.model_stats import ParameterCount, count_parameters


def build_conv_net(api: Any) -> Any:
    """Returns a net with 4 * (9 + 1), 4 * 4 and 10 * (4 * 36 + 1) parameters in its layers."""
    layers = api.layers
    first = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Dropout(0.5)]
    return api.Sequential([api.Input((8, 8, 1)), *first, layers.Flatten(), layers.Dense(10)])


class Plain(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones((3, 4)), name="kernel")
        self.tied = self.kernel
        self.table = tf.Variable(tf.ones((5,), tf.float16), trainable=False, name="table")

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.kernel


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_count_is_that_of_keras_compiled_and_frozen(api: Any) -> None:
    model = build_conv_net(api)
    count = count_parameters(model)

    assert count == ParameterCount(trainable=40 + 8 + 1450, non_trainable=8)
    assert count.total == model.count_params() == 1506
    assert str(count) == "1,506 parameters, 1,498 of them trainable"

    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    model.fit(tf.ones((2, 8, 8, 1)), tf.ones((2, 10)), verbose=0)

    assert count_parameters(model) == count

    model.layers[-1].trainable = False
    assert count_parameters(model) == ParameterCount(trainable=48, non_trainable=1458)


def test_a_module_counts_each_variable_once() -> None:
    assert count_parameters(Plain()) == ParameterCount(trainable=12, non_trainable=5)


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_model_that_is_not_built_says_so(api: Any) -> None:
    model = api.Sequential([api.layers.Dense(3)])

    assert "not built" in count_parameters(model).problem
    assert str(count_parameters(model)).startswith("parameters unknown: ")

    model(tf.ones((1, 2)))

    assert count_parameters(model) == ParameterCount(trainable=9, non_trainable=0)
