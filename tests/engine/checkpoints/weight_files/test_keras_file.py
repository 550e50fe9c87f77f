"""The variables in files of Keras."""

from __future__ import annotations

from pathlib import Path

import h5py
import keras
import pytest

from trainer_kit.checkpoints.weight_files.keras_file import KerasFile
from trainer_kit.checkpoints.weight_files.open_file import open_weights
from trainer_kit.errors import UsageError


def test_names_that_keras_2_has_split_are_joined(tmp_path: Path) -> None:
    layers = [
        keras.layers.Dense(1, name=f"a_long_name_{'of_a_layer_' * 200}{number}")
        for number in range(30)
    ]
    net = keras.Sequential([keras.Input((1,)), keras.Sequential(layers, name="inner")])

    net.save(tmp_path / "net.h5")

    with h5py.File(tmp_path / "net.h5") as file:
        assert "weight_names0" in file["model_weights/inner"].attrs

    assert len(KerasFile(str(tmp_path / "net.h5")).shapes) == 60


def test_a_file_without_variables_is_an_error(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((1,)), keras.layers.ReLU()]).save_weights(
        tmp_path / "net_1.0.weights.h5"
    )

    with pytest.raises(
        UsageError, match=r"net_1.0.weights.h5, a Keras file \(.weights.h5\), holds no variables"
    ):
        open_weights(str(tmp_path / "net_1.0.weights.h5"))
