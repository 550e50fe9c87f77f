"""The History has all that Keras's has: vectors, what callbacks add, and what steps return."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.compat.keras.keras_programs import CROSSENTROPY, X, Y
from trainer_kit.compat import keras as tk_keras


class Adds(keras.callbacks.Callback):
    """Adds a matrix, a text and a variable to the logs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs |= {"matrix": np.eye(2) * epoch, "time": "12:00", "rate": self.model.optimizer.learning_rate}


class ReturnsRate(keras.Model):
    """Returns its learning rate, a variable of Keras, and evaluates without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "learning_rate": self.optimizer.learning_rate}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"size": tf.reduce_mean(tf.abs(self(data[0], training=False)))}


class ReturnsOwnLoss(keras.Model):
    """Returns losses under the name of the tracker of compile, which it never updates, and reads the tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {**self.get_metrics_result(), "loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": tf.reduce_mean(tf.square(self(data[0]) - data[1]))}


def one_per_class() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(
        "sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(average=None, name="f1")], jit_compile=False
    )
    return model


def assert_same(history: Any, expected: Any) -> None:
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        if name == "time":
            assert history.history[name] == values
        else:
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_in_place_of_a_metric_is_reported(replicas: int, tmp_path: Path) -> None:
    losses: list[list[float]] = [[], []]
    targets = X.sum(axis=1, keepdims=True)
    for door, seen in zip((keras.Model.fit, tk_keras.fit), losses, strict=True):
        devices = ["CPU:0", "CPU:1"][:replicas]
        with tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice()).scope():
            model = ReturnsOwnLoss()
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs, to=seen: to.append(logs["loss"]))
        options = {"validation_data": (X, targets), "batch_size": 50, "epochs": 2, "shuffle": False, "verbose": 0}
        folder = {} if door is keras.Model.fit else {"model_dir": str(tmp_path)}
        history = door(model, X, targets, callbacks=[note], **options, **folder).history
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(history["loss"], losses[0][1::2], rtol=1e-5)  # Keras shows 0 at the end of an epoch
    last_batch = np.mean(np.square(model.predict(X[50:], verbose=0) - targets[50:]))
    np.testing.assert_allclose(history["val_loss"][-1], last_batch, rtol=1e-5)
    best = json.loads((tmp_path / "best_ckpt" / "info.json").read_text())
    assert best["value"] == pytest.approx(min(history["val_loss"]))


Fits = tuple[Any, list[Any], list[Any]]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Fits:
    """The History of Keras's fit of two epochs; models and Histories of ours: of one epoch, of two and of two again."""
    given = {"x": X, "y": keras.utils.to_categorical(Y), "validation_data": (X, keras.utils.to_categorical(Y))}
    options, folder = {**given, "verbose": 0, "callbacks": [Adds()]}, str(tmp_path_factory.mktemp("run"))
    expected, models, found = one_per_class().fit(**options, epochs=2), [], []
    for epochs in (1, 2, 2):
        models.append(one_per_class())
        found.append(tk_keras.fit(models[-1], **options, epochs=epochs, model_dir=folder))
    return expected, models, found


def test_vectors_and_added_logs_are_in_the_history(fits: Fits) -> None:
    expected, _, (_, resumed, finished) = fits
    assert np.shape(expected.history["f1"]) == (2, 3)
    assert_same(resumed, expected)
    assert_same(finished, expected)


def test_epochs_is_a_total(fits: Fits) -> None:
    expected, models, (first, longer, _) = fits
    assert (first.epoch, longer.epoch) == ([0], [0, 1])
    for one, other in zip(models[1].get_weights(), expected.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_finished_fit_returns_history_and_trained_weights(fits: Fits) -> None:
    _, models, (_, before, again) = fits
    np.testing.assert_equal(again.history, before.history)
    assert again.epoch == before.epoch
    assert again.model is models[2]
    for one, other in zip(models[2].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_return_what_they_like(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"x": X, "y": Y, "validation_data": (X, Y), "epochs": 1, "verbose": 0}
    histories = []
    for door in (keras.Model.fit, tk_keras.fit):
        keras.utils.set_random_seed(3)
        model = ReturnsRate()
        model.compile("sgd", CROSSENTROPY, jit_compile=False)
        with caplog.at_level(logging.INFO):
            histories.append(door(model, **options, **({} if len(histories) == 0 else {"model_dir": str(tmp_path)})))
    expected, history = histories
    assert_same(history, expected)
    assert list(history.history) == ["learning_rate", "loss", "val_size"]
    assert "no best weights are kept" in caplog.text
    assert not (tmp_path / "best_ckpt").exists()
