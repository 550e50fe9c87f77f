"""The artifacts of a job are written whole, and in the form that others read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from trainer_kit.compat.pipelines.artifacts import export_saved_model, write_history_csv
from trainer_kit.errors import StorageError


class OneFileModel:
    """Stands for a model: it writes one file."""

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self._text = text
        self._error = error

    def export(self, path: str, **options: Any) -> None:
        Path(path, "saved_model.pb").write_text(self._text)
        if self._error is not None:
            raise self._error


def test_history_csv_is_what_pandas_writes(tmp_path: Path) -> None:
    history = {
        "loss": [0.1, float("nan")],
        "f1": [np.array([0.5, 1.0])] * 2,
        "count": [1, 2],
        "rate": [1e-05, 1],
    }
    path = tmp_path / "new" / "history.csv"

    write_history_csv(str(path), history)

    expected = ",loss,f1,count,rate\n0,0.1,[0.5 1. ],1,1e-05\n1,,[0.5 1. ],2,1.0\n"
    assert path.read_text() == expected
    assert pd.DataFrame(history).to_csv() == expected


def test_a_log_that_began_later_has_empty_cells_before(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    write_history_csv(str(path), {"loss": [3.0, 2.0, 1.0], "learning_rate": [0.5]})
    assert path.read_text() == ",loss,learning_rate\n0,3.0,\n1,2.0,\n2,1.0,0.5\n"


def test_a_saved_model_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "saved_model"
    for text in ("old", "new"):
        export_saved_model(OneFileModel(text), str(path))

    assert (path / "saved_model.pb").read_text() == "new"
    assert os.listdir(path.parent) == ["saved_model"]


def test_the_older_model_is_whole_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved_model"
    export_saved_model(OneFileModel("old"), str(path))
    rename = os.rename
    states = []

    def record_state(source: Any, target: Any) -> None:
        states.append([file.read_text() for file in path.glob("*")] if path.exists() else None)
        rename(source, target)

    monkeypatch.setattr(os, "rename", record_state)
    export_saved_model(OneFileModel("new"), str(path))

    assert states == [["old"], None]


def test_a_failed_export_leaves_the_older_model(tmp_path: Path) -> None:
    path = tmp_path / "saved_model"
    export_saved_model(OneFileModel("old"), str(path))

    with pytest.raises(ZeroDivisionError):
        export_saved_model(OneFileModel("new", ZeroDivisionError()), str(path))
    assert (path / "saved_model.pb").read_text() == "old"
    assert os.listdir(tmp_path) == ["saved_model"]


def test_files_that_a_killed_export_left_are_removed(tmp_path: Path) -> None:
    # No process has this number.
    (tmp_path / ".saved_model.999999999.tmp" / "variables").mkdir(parents=True)
    export_saved_model(OneFileModel("new"), str(tmp_path / "saved_model"))
    assert os.listdir(tmp_path) == ["saved_model"]


def test_an_export_to_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    model = OneFileModel("new", OSError(28, "No space left on device"))

    message = "saved_model cannot be written: No space left on device"
    with pytest.raises(StorageError, match=message):
        export_saved_model(model, str(tmp_path / "saved_model"))


@pytest.mark.parametrize("is_sequential", [False, True])
def test_a_saved_model_augments_nothing(tmp_path: Path, is_sequential: bool) -> None:
    augmentation = [keras.layers.RandomFlip(seed=1), keras.layers.RandomContrast(0.5, seed=2)]
    model = keras.Sequential([keras.Input((4, 4, 1)), *augmentation])
    if not is_sequential:
        model = keras.Model(model.inputs[0], model.outputs[0])
    images = np.random.RandomState(0).rand(3, 4, 4, 1).astype("float32")

    export_saved_model(model, str(tmp_path / "saved_model"))

    outputs = tf.saved_model.load(str(tmp_path / "saved_model")).serve(images)
    np.testing.assert_array_equal(outputs, images)
