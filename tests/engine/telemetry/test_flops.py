from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.telemetry.flops import FlopsResult, count_flops

BOTH = pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])


def build_mlp(api: Any) -> Any:
    layers = api.layers
    return api.Sequential([api.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])


class Einsum(tf.Module):
    def __init__(self, equation: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.equation = equation
        self.kernel = tf.ones(shape)

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.einsum(self.equation, inputs, self.kernel)


def build_convolution(api: Any) -> Any:
    return api.Sequential(
        [api.Input((10, 10, 3)), api.layers.Conv2D(8, 3, strides=2, padding="same")]
    )


def build_depthwise(api: Any) -> Any:
    return api.Sequential([api.Input((8, 8, 3)), api.layers.DepthwiseConv2D(3, use_bias=False)])


@BOTH
@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        # The profiler counts the bias and not ReLU.
        (build_mlp, (None, 64), (2 * 64 * 32 + 32) + (2 * 32 * 10 + 10)),
        (build_mlp, (256, 64), (2 * 64 * 32 + 32) + (2 * 32 * 10 + 10)),
        (build_convolution, (None, 10, 10, 3), 5 * 5 * 8 * (2 * 3 * 3 * 3 + 1)),
        (build_depthwise, (None, 8, 8, 3), 6 * 6 * 3 * 2 * 9),
    ],
)
def test_flops_of_layers_are_exact(
    make: Any, shape: tuple[int | None, ...], flops: int, api: Any
) -> None:
    assert count_flops(make(api), tf.TensorSpec(shape)) == FlopsResult(flops)


@pytest.mark.parametrize(
    ("equation", "inputs", "kernel", "flops"),
    [
        ("ij,jk->ik", (1, 4), (4, 5), 2 * 4 * 5),
        ("...ij,jk->...ik", (1, 2, 3, 4), (4, 5), 2 * 2 * 3 * 4 * 5),
        ("abd,dnh->abnh", (1, 8, 16), (16, 2, 4), 2 * 8 * 16 * 2 * 4),
        ("ij...,jk...->ik...", (1, 4, 3, 2), (4, 5, 2), 2 * 4 * 5 * 3 * 2),
    ],
)
def test_einsum_is_counted(
    equation: str, inputs: tuple[int, ...], kernel: tuple[int, ...], flops: int
) -> None:
    assert count_flops(Einsum(equation, kernel), tf.TensorSpec(inputs)) == FlopsResult(flops)


def test_each_call_of_a_nested_function_is_counted() -> None:
    assert count_flops(_Nested(), {"x": tf.TensorSpec((None, 3))}) == FlopsResult(3 * 2 * 3 * 3)


def test_einsum_is_counted_once_even_if_others_count_it() -> None:
    # It registers its own rule for Einsum.
    pytest.importorskip("official.core.train_utils")

    assert count_flops(Einsum("ij,jk->ik", (4, 5)), tf.TensorSpec((1, 4))) == FlopsResult(40)
    assert count_flops(
        Einsum("ij...,jk...->ik...", (4, 5, 2)), tf.TensorSpec((1, 4, 3, 2))
    ) == FlopsResult(240)


class _Nested(tf.Module):
    """Two functions, one of which calls the other twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones([3, 3]))

    @tf.function
    def product(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.kernel

    @tf.function
    def twice(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.product(self.product(inputs))

    def __call__(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return self.twice(inputs["x"]) @ self.kernel


def test_products_in_a_loaded_saved_model_are_told(tmp_path: Path) -> None:
    module = tf.Module()
    module.kernel = tf.Variable(tf.ones([3, 4]))
    module.call = tf.function(
        lambda x: x @ module.kernel, input_signature=[tf.TensorSpec([None, 3])]
    )
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))

    result = count_flops(lambda x: loaded.call(x), tf.TensorSpec([None, 3]))

    assert result == FlopsResult(0, "a lower bound, these operations are not counted: 1 MatMul")


def test_calls_of_functions_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.telemetry.flops.get_called_functions", lambda _: {})

    assert (
        "1 StatefulPartitionedCall"
        in count_flops(_Nested(), {"x": tf.TensorSpec([None, 3])}).problem
    )


def test_the_model_is_called_for_inference_and_keeps_its_state() -> None:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    before = [variable.numpy() for variable in model.variables]

    assert count_flops(model, tf.TensorSpec((None, 4))).problem == ""
    assert all(
        (variable.numpy() == value).all()
        for variable, value in zip(model.variables, before, strict=True)
    )


def test_what_is_not_counted_is_told() -> None:
    model = keras.Sequential([keras.Input((8, 3)), keras.layers.LSTM(5)])
    result = count_flops(model, tf.TensorSpec((None, 8, 3)))

    assert result.flops is not None
    assert "1 While" in result.problem
    assert "lower bound" in str(result)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (tf.TensorSpec((None, 65)), "expected axis -1 of input shape to have value 64"),
        (tf.TensorSpec((None, None)), "known size in every dimension"),
        (None, "NoneType"),
    ],
)
def test_a_failure_says_why_in_one_plain_line(spec: Any, reason: str) -> None:
    result = count_flops(build_mlp(keras), spec)

    assert result.flops is None
    assert reason in result.problem
    assert result.problem.isprintable()
    assert str(result).startswith("FLOPs unknown: ")


@BOTH
def test_a_model_that_is_not_built_is_left_so(api: Any) -> None:
    model = api.Sequential([api.layers.Dense(3)])

    assert "not built" in count_flops(model, tf.TensorSpec((None, 4))).problem
    assert not model.built
