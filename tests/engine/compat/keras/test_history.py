"""The History has all that Keras's has: vectors, what callbacks add, and what steps return."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import read_json, replicas
from tests.engine.compat.keras.keras_programs import (
    CROSSENTROPY,
    X,
    Y,
    assert_same_history,
    assert_same_weights,
    linear,
)
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.hand_written_loop import LoopMetrics
from trainer_kit.compat.keras.keras_trainer import KerasMetrics
from trainer_kit.compat.keras.step_preparation import prepare_step

TARGETS = X.sum(axis=1, keepdims=True)


class Adds(keras.callbacks.Callback):
    """Adds a matrix, a text and a variable to the logs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs |= {
            "matrix": np.eye(2) * epoch,
            "time": "12:00",
            "rate": self.model.optimizer.learning_rate,
        }


class Predictions(keras.metrics.Metric):
    """A metric that is a vector: how often each class is predicted."""

    def __init__(self) -> None:
        super().__init__(name="predictions")
        self.numbers = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.numbers.assign_add(tf.reduce_sum(tf.one_hot(tf.argmax(y_pred, -1), 3), 0))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.numbers)


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
    """Returns losses under the name of the tracker of compile, which it never updates, and reads
    the tracker.
    """

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


def build_model_with_own_loss() -> Any:
    """Returns a compiled model of ReturnsOwnLoss."""
    model = ReturnsOwnLoss()
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def test_a_loss_in_place_of_a_metric_is_reported(tmp_path: Path) -> None:
    losses: list[list[float]] = [[], []]
    for door, losses_of_door in zip((keras.Model.fit, tk_keras.fit), losses, strict=True):
        model = build_model_with_own_loss()
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs, to=losses_of_door: to.append(logs["loss"])
        )
        options = {
            "validation_data": (X, TARGETS),
            "batch_size": 50,
            "epochs": 2,
            "shuffle": False,
            "verbose": 0,
        }
        folder = {} if door is keras.Model.fit else {"model_dir": str(tmp_path)}
        history = door(model, X, TARGETS, callbacks=[note], **options, **folder).history

    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    # Keras shows 0 at the end of an epoch.
    np.testing.assert_allclose(history["loss"], losses[0][1::2], rtol=1e-5)

    last_batch = np.mean(np.square(model.predict(X[50:], verbose=0) - TARGETS[50:]))
    np.testing.assert_allclose(history["val_loss"][-1], last_batch, rtol=1e-5)

    best = read_json(tmp_path / "best_ckpt" / "info.json")
    assert best["value"] == pytest.approx(min(history["val_loss"]))


def test_a_loss_in_place_of_a_metric_is_found_on_two_replicas() -> None:
    data = tf.data.Dataset.from_tensor_slices((X, TARGETS)).batch(50)
    with replicas(2).scope():
        model = build_model_with_own_loss()
        log_specs = prepare_step(model.train_step, model, data)

    assert log_specs == {"loss": tf.TensorSpec([], tf.float32)}


def test_epochs_is_a_total_and_a_finished_fit_returns_all(tmp_path: Path) -> None:
    models = []
    histories = []
    for epochs in (2, 1, 2, 2):
        model = linear(metrics=[Predictions()])
        options = {
            "validation_data": (X, Y),
            "epochs": epochs,
            "verbose": 0,
            "callbacks": [Adds()],
        }
        if models:
            histories.append(tk_keras.fit(model, X, Y, **options, model_dir=str(tmp_path)))
        else:
            histories.append(model.fit(X, Y, **options))
        models.append(model)
    expected, first, longer, finished = histories
    for name in ("predictions", "val_predictions"):
        assert np.shape(expected.history[name]) == (2, 3)
    times = [history.history.pop("time") for history in (expected, longer, finished)]
    assert times[0] == times[1] == times[2]
    assert first.epoch == [0]
    assert_same_history(longer, expected)
    np.testing.assert_equal(finished.history, longer.history)
    assert finished.model is models[3]
    assert_same_weights(models[3], models[2])
    np.testing.assert_allclose(
        models[2].get_weights()[0], models[0].get_weights()[0], rtol=1e-6, atol=1e-6
    )


def test_steps_return_what_they_like(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"x": X, "y": Y, "validation_data": (X, Y), "epochs": 1, "verbose": 0}
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = ReturnsRate()
        model.compile("sgd", CROSSENTROPY, jit_compile=False)
        models.append(model)

    expected = models[0].fit(**options)
    with caplog.at_level(logging.INFO):
        history = tk_keras.fit(models[1], **options, model_dir=str(tmp_path))

    assert_same_history(history, expected)
    assert list(history.history) == ["learning_rate", "loss", "val_size"]
    assert "no best weights are kept" in caplog.text
    assert not (tmp_path / "best_ckpt").exists()


def test_metrics_of_an_epoch_continue_from_earlier_releases() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    variables_of_fit = KerasMetrics("training_loss", model, {}).variables()
    variables_of_loop = LoopMetrics("training_loss", [keras.metrics.Mean("mean")]).variables()

    shapes_of_model = [()] * len(model.metrics_variables)
    shapes_of_fit = [tuple(variable.shape) for variable in variables_of_fit]
    assert shapes_of_fit == [(), (), (64, 2), *shapes_of_model]
    assert [tuple(variable.shape) for variable in variables_of_loop] == [(), (), (), (), (64, 2)]
