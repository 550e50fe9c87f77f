"""How large a model is and what it computes, beside Model Garden's, on models of both Keras and a tf.Module."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras
from official.core import train_utils

from trainer_kit.compat.model_garden.training.model_stats import try_count_flops, try_count_params, write_model_params

BOTH = pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
FLOPS = (2 * 6 * 4 + 4) + (2 * 4 * 3 + 3)


def _model(api: Any) -> Any:
    layers = api.layers
    return api.Sequential([api.Input((6,)), layers.Dense(4, activation="relu"), layers.Dropout(0.5), layers.Dense(3)])


class _Subclass(tf_keras.Model):
    """Knows its inputs only when it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = tf_keras.layers.EinsumDense("abc,cde->abde", output_shape=(None, 2, 4))

    def call(self, queries: Any, scale: float = 1.0) -> Any:
        return self.dense(queries) * scale


class _Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones([6, 4]), name="kernel")
        self.frozen = tf.Variable(tf.ones([5]), name="frozen", trainable=False)

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.kernel


@BOTH
def test_parameters_are_counted_as_theirs(api: Any) -> None:
    model = _model(api)
    assert try_count_params(model) == train_utils.try_count_params(model) == 6 * 4 + 4 + 4 * 3 + 3


@pytest.mark.parametrize("trainable_only", [False, True])
def test_a_modules_parameters_are_counted_as_theirs(trainable_only: bool) -> None:
    expected = 24 if trainable_only else 29
    assert try_count_params(_Module(), trainable_only) == expected
    assert train_utils.try_count_params(_Module(), trainable_only) == expected


@BOTH
def test_of_a_keras_model_too_only_what_is_trained_is_counted_when_asked(api: Any) -> None:
    model = _model(api)
    model.layers[0].trainable = False
    assert try_count_params(model, trainable_only=True) == 4 * 3 + 3
    assert train_utils.try_count_params(model, trainable_only=True) == 43  # it leaves the argument aside


@pytest.mark.parametrize("trainable_only", [False, True])
@BOTH
def test_a_model_that_is_not_built_has_no_count_and_the_reason_is_told(
    api: Any, trainable_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = api.Sequential([api.layers.Dense(3)])
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        assert try_count_params(model, trainable_only) is None
    assert "the number of parameters is not known: " in caplog.text
    assert "built" in caplog.text


def test_a_tf_keras_models_flops_are_counted_as_theirs() -> None:
    model = _model(tf_keras)
    assert try_count_flops(model) == train_utils.try_count_flops(model) == FLOPS


def test_a_keras_3_models_flops_are_counted_where_theirs_gives_up() -> None:
    model = _model(keras)
    assert try_count_flops(model) == FLOPS
    assert train_utils.try_count_flops(model) is None


def test_a_subclass_is_counted_by_the_specs_of_its_arguments_as_theirs() -> None:
    model = _Subclass()
    model(tf.ones([1, 5, 6]))
    arguments = {"queries": tf.TensorSpec([2, 5, 6]), "scale": tf.TensorSpec([])}
    einsum = 2 * (2 * 5 * 2 * 4) * 6
    theirs = train_utils.try_count_flops(model, arguments)
    assert theirs is not None
    assert try_count_flops(model, arguments) == theirs == einsum + 2 * 5 * 2 * 4  # and the scaling
    assert try_count_flops(model, {"queries": tf.TensorSpec([2, 5, 6])}) is not None


@BOTH
def test_several_inputs_of_a_functional_model_are_told_apart(api: Any) -> None:
    inputs = {"left": api.Input((6,), name="left"), "right": api.Input((3,), name="right")}
    model = api.Model(inputs, api.layers.Dense(4, use_bias=False)(inputs["left"]))
    assert try_count_flops(model) == 2 * 6 * 4


@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        (lambda: tf_keras.Sequential([tf_keras.layers.Dense(3)]), None, "does not know its inputs"),
        (lambda: _Module(), None, "does not know its inputs"),
        (lambda: _model(tf_keras), {"inputs": 3}, ""),
        (lambda: _Subclass(), {"no_such_argument": tf.TensorSpec([2])}, "TypeError"),
    ],
)
def test_what_cannot_be_counted_is_told_with_the_reason(
    model: Any, arguments: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        result = try_count_flops(model(), arguments)
    assert (result is None) == bool(told)
    assert told in caplog.text


def test_the_profilers_account_is_written_like_theirs(tmp_path: Path) -> None:
    for name, count in (("ours", try_count_flops), ("theirs", train_utils.try_count_flops)):
        count(_model(tf_keras), output_path=str(tmp_path / name))
    ours, theirs = ((tmp_path / name).read_text() for name in ("ours", "theirs"))
    assert "MatMul" in ours and "MatMul" in theirs


@BOTH
def test_weights_are_written_with_their_shapes(tmp_path: Path, api: Any) -> None:
    model = _model(api)
    write_model_params(model, str(tmp_path / "new" / "ours.txt"))
    lines = (tmp_path / "new" / "ours.txt").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines[:4]] == ["[6, 4]", "[4]", "[4, 3]", "[3]"]
    assert lines[4:] == ["", "Total params: 43"]


def test_of_a_tf_keras_model_and_a_module_the_file_is_theirs(tmp_path: Path) -> None:
    for model in (_model(tf_keras), _Module()):
        write_model_params(model, str(tmp_path / "ours"))
        train_utils.write_model_params(model, str(tmp_path / "theirs"))
        assert (tmp_path / "ours").read_text() == (tmp_path / "theirs").read_text()


@BOTH
def test_a_model_without_weights_yet_is_a_value_error_and_leaves_no_file(tmp_path: Path, api: Any) -> None:
    with pytest.raises(ValueError, match="built"):
        write_model_params(api.Sequential([api.layers.Dense(3)]), str(tmp_path / "ours"))
    assert list(tmp_path.iterdir()) == []
