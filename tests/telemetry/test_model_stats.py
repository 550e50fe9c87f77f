from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.errors import StorageError
from trainer_kit.telemetry.model_stats import ParameterCount, count_parameters, model_summary, write_model_summary


def conv_net(api: Any) -> Any:
    """Parameters: 4 * (9 + 1) of the convolution, 4 * 4 of batch normalisation, 10 * (4 * 36 + 1) of the last layer."""
    layers = api.layers
    return api.Sequential(
        [
            api.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


class Plain(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones((3, 4)), name="kernel")
        self.tied = self.kernel
        self.table = tf.Variable(tf.ones((5,), tf.float16), trainable=False, name="table")

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.kernel


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_total_is_that_of_keras(api: Any) -> None:
    model = conv_net(api)
    count = count_parameters(model)
    assert count == ParameterCount(trainable=40 + 8 + 1450, non_trainable=8)
    assert count.total == model.count_params() == 1506
    assert str(count) == "1,506 parameters, 1,498 of them trainable"


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_frozen_layer_is_not_trainable(api: Any) -> None:
    model = conv_net(api)
    model.layers[-1].trainable = False
    assert count_parameters(model) == ParameterCount(trainable=48, non_trainable=1458)


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_compiled_and_trained_model_counts_the_same(api: Any) -> None:
    model = conv_net(api)
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(tf.ones((2, 8, 8, 1)), tf.ones((2, 10)), verbose=0)
    assert count_parameters(model).total == model.count_params() == 1506


def test_a_module_counts_each_variable_once() -> None:
    assert count_parameters(Plain()) == ParameterCount(trainable=12, non_trainable=5)


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_model_that_is_not_built_says_so(api: Any) -> None:
    model = api.Sequential([api.layers.Dense(3)])
    assert "not built" in count_parameters(model).problem
    assert str(count_parameters(model)).startswith("parameters unknown: ")
    assert "not built" in model_summary(model)
    model(tf.ones((1, 2)))
    assert count_parameters(model) == ParameterCount(trainable=9, non_trainable=0)


def test_the_summary_lists_every_weight_and_the_totals() -> None:
    lines = model_summary(Plain()).splitlines()
    assert [line.split() for line in lines] == [
        ["weight", "shape", "dtype", "parameters"],
        ["kernel:0", "(3,", "4)", "float32", "12"],
        ["table:0", "(5,)", "float16", "5", "not", "trained"],
        [],
        ["Total", "params:", "17"],
        ["Trainable", "params:", "12"],
        ["Non-trainable", "params:", "5"],
    ]


@pytest.mark.parametrize("api", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_the_summary_of_a_keras_model_names_its_weights(api: Any) -> None:
    model = conv_net(api)
    summary = model_summary(model)
    assert len([line for line in summary.splitlines() if " float32 " in line]) == len(model.weights) == 8
    assert "Total params: 1,506\nTrainable params: 1,498\nNon-trainable params: 8" in summary


@pytest.mark.parametrize("place", ["{tmp}/new/model.txt", "ram://telemetry/model.txt"])
def test_the_summary_is_written_to_a_file(tmp_path: Path, place: str) -> None:
    model, path = Plain(), place.format(tmp=tmp_path)
    write_model_summary(model, path)
    with tf.io.gfile.GFile(path) as stream:
        assert stream.read() == model_summary(model) + "\n"


@pytest.mark.parametrize("place", ["{tmp}/file/model.txt", "nowhere://bucket/model.txt"])
def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_model_summary(Plain(), place.format(tmp=tmp_path))
