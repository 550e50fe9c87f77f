"""Starting weights from the checkpoint of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint, restore
from trainer_kit.checkpoints.state.variable_names import model_variables
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.training.initial_weights.weight_loading import load_initial_weights


def _build_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3)])


def _save_checkpoint(folder: Path, model: Any, step: int = 5) -> str:
    """A checkpoint of a run: weights, an optimizer, and a step that must not be taken over."""
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    counter = tf.Variable(step, dtype=tf.int64)
    return create_training_checkpoint(global_step=counter, model=model, optimizer=optimizer).write(
        f"{folder}/ckpt-{step}"
    )


def test_weights_come_from_a_path_or_the_newest_of_a_folder(tmp_path: Path) -> None:
    old = _build_model()
    new = _build_model()
    first = _save_checkpoint(tmp_path, old, 5)
    second = _save_checkpoint(tmp_path, new, 40)
    for path, prefix, source in ((first, first, old), (str(tmp_path), second, new)):
        model = _build_model()
        (report,) = load_initial_weights(model, path)
        assert f"took 4 of 4 variables from {prefix}, a TensorFlow 2 checkpoint" in report
        assert_all_close(model.get_weights(), source.get_weights())


@pytest.mark.parametrize("path", ["{}", "{}/ckpt-9", "{}/nowhere"])
def test_error_names_the_path_without_a_checkpoint(tmp_path: Path, path: str) -> None:
    message = (
        f"task.init_checkpoint: (there is no checkpoint )?{path.format(tmp_path)}(; in| "
        "holds no checkpoint)"
    )
    with pytest.raises(UsageError, match=message):
        load_initial_weights(_build_model(), path.format(tmp_path))


def test_a_damaged_checkpoint_is_a_storage_error(tmp_path: Path) -> None:
    path = _save_checkpoint(tmp_path, _build_model())
    Path(f"{path}.index").write_bytes(b"broken")

    with pytest.raises(StorageError, match="ckpt-5 is damaged"):
        load_initial_weights(_build_model(), path)


def _build_model_with_body() -> Any:
    body = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((3,)), body, keras.layers.Dense(1)])
    more = {"list": [keras.layers.Normalization(axis=None)], "count": tf.Variable(1)}
    model.checkpoint_items = {"body": body, "more": more}
    return model


@pytest.mark.parametrize("form", ["named", "as TensorFlow tracks it"])
def test_items_of_keras_three_are_loaded_in_either_form(tmp_path: Path, form: str) -> None:
    saved = _build_model_with_body()
    model = _build_model_with_body()
    step = tf.Variable(0, dtype=tf.int64)
    for module in (saved, model):
        module.checkpoint_items = {"body": module.checkpoint_items["body"]}
    if form == "named":
        path = create_training_checkpoint(global_step=step, model=saved).write(
            str(tmp_path / "ckpt")
        )
    else:
        path = tf.train.Checkpoint(model=model_variables(saved), **saved.checkpoint_items).write(
            str(tmp_path / "ckpt")
        )

    load_initial_weights(model, path)

    assert all(
        np.array_equal(a, b) for a, b in zip(saved.get_weights(), model.get_weights(), strict=True)
    )


def test_items_of_keras_three_are_saved_twice_and_restored(tmp_path: Path) -> None:
    model = _build_model_with_body()
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = create_training_checkpoint(global_step=step, model=model)
    options = tf.train.CheckpointOptions(enable_async=True)
    for number in range(3):
        step.assign(number)
        checkpoint.save(str(tmp_path / "ckpt"), options)

    checkpoint.sync()
    again = _build_model_with_body()
    there = tf.Variable(5, dtype=tf.int64)

    restore(
        create_training_checkpoint(global_step=there, model=again),
        str(tmp_path / "ckpt-3"),
        strict=True,
    )

    assert int(there) == 2
    assert all(
        np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True)
    )
