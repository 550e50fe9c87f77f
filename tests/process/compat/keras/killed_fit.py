"""A program with tk_keras.fit that may kill its process."""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import numpy as np

from tests.process.compat.keras.programs import Kill
from trainer_kit.compat import keras as tk_keras


class Halve(keras.callbacks.Callback):
    """Halves the learning rate when an epoch begins."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate / 2)


class WarmUp(keras.callbacks.Callback):
    """Raises the learning rate in the first three epochs, and notes batches and their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.batches: list[int] = []
        self.losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.epoch < 3:
            self.model.optimizer.learning_rate = 1e-4 * (10 * self.epoch + batch + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)
        self.losses.append(logs["loss"])


def file_callbacks(folder: str) -> list[Any]:
    """Returns callbacks that write files to a folder."""
    best = keras.callbacks.ModelCheckpoint(
        f"{folder}/best-{{epoch}}-{{batch}}.weights.h5",
        "loss",
        save_best_only=True,
        save_weights_only=True,
        save_freq=10,
    )
    every = keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}-{{batch}}.keras", save_freq=7)
    log = keras.callbacks.CSVLogger(f"{folder}/log.csv")
    return [best, every, log, keras.callbacks.TensorBoard(f"{folder}/board", update_freq="batch")]


def run_killed(folder: str, step: int) -> None:
    """Trains until the process kills itself, after a step."""
    train_model(folder, step)


def run_to_the_end(*folders: str) -> None:
    """Trains one run after the other, in their folders, and prints the results."""
    print(json.dumps([train_model(folder) for folder in folders]))


def train_model(folder: str, kill: int = 0) -> dict[str, Any]:
    """Trains five epochs of 10 steps, with a checkpoint every four steps; returns history, weights
    and batches.

    Args:
      folder: The folder of the run and of the files of its callbacks.
      kill: The step after which the process kills itself; 0: none.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    random = np.random.RandomState(0)
    x = random.randn(400, 8)
    y = random.randint(0, 3, 400)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.5)
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=4, min_delta=10.0, restore_best_weights=True
    )
    warm_up = WarmUp()
    files = f"{folder}/files"
    os.makedirs(files, exist_ok=True)
    callbacks = [plateau, Halve(), stopping, warm_up, *file_callbacks(files)]
    if kill:
        callbacks.append(Kill(kill))

    history = tk_keras.fit(
        model,
        x,
        y,
        epochs=6,
        validation_split=0.2,
        verbose=0,
        model_dir=f"{folder}/run",
        checkpoint_interval=4,
        callbacks=callbacks,
    )

    values = [*model.get_weights(), np.asarray(model.optimizer.learning_rate)]
    return {
        "history": history.history,
        "epoch": history.epoch,
        "weights": [value.tobytes().hex() for value in values],
        "batches": warm_up.batches,
        "losses": warm_up.losses,
    }
