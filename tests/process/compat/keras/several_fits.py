"""A program of three fits, as pretraining and fine-tuning are, that may kill its process in one of
them.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.process.compat.keras.programs import Kill
from trainer_kit.compat import keras as tk_keras

BATCH = 16
STEPS = 5


class WarmUp(keras.callbacks.Callback):
    """Trains with rising rates from a small one on, stops the fit after some steps, and puts the
    rate back.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.rate: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.losses: list[float] = []
        self.rate = float(self.model.optimizer.learning_rate)
        self.model.optimizer.learning_rate = 1e-4

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        if len(self.losses) % 4 == 0:
            self.model.optimizer.learning_rate = self.rate * len(self.losses) / self.steps
        self.model.stop_training = len(self.losses) == self.steps

    def on_train_end(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = self.rate
        self.mean = float(np.mean(self.losses))


def run_killed(folder: str, fit: int, step: int) -> None:
    """Trains until the process kills itself, in the fit of this number, after a step of it."""
    train_three_times(folder, {fit: [Kill(step)]})


def run_to_the_end(*folders: str) -> None:
    """Runs the program in one folder after the other, and prints the results."""
    print(json.dumps([train_three_times(folder, {}) for folder in folders]))


def train_three_times(folder: str, kills: dict[int, list[Any]]) -> dict[str, Any]:
    """Trains a model in three fits, the second and third with the same shuffled dataset."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    random = np.random.RandomState(0)
    x = random.randn(STEPS * BATCH, 8).astype("float32")
    y = x[:, :3].argmax(1)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5).batch(BATCH)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.2), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    warm_up = WarmUp(8)
    optimizer = keras.optimizers.SGD(0.05)

    def train_step(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(features, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    options = {"checkpoint_interval": 3, "verbose": 0}
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    callbacks = [warm_up, *kills.get(1, [])]
    tk_keras.fit(
        model,
        x,
        y,
        batch_size=BATCH,
        epochs=3,
        callbacks=callbacks,
        model_dir=f"{folder}/1",
        **options,
    )
    tk_keras.train_loop(
        train_step,
        shuffled,
        epochs=2,
        model=model,
        optimizer=optimizer,
        model_dir=f"{folder}/2",
        **options,
    )
    tk_keras.fit(
        model, shuffled, epochs=3, callbacks=kills.get(3), model_dir=f"{folder}/3", **options
    )

    weights = [weight.tobytes().hex() for weight in model.get_weights()]
    attributes = {"losses": warm_up.losses, "mean": warm_up.mean, "rate": warm_up.rate}
    return {"weights": weights, "rate": float(model.optimizer.learning_rate), **attributes}
