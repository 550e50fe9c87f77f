"""A fit of one of two workers, with callbacks of Keras that write files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat import keras as tk_keras

EPOCHS = 2


def fit(hosts: Sequence[str], index: int, folder: str) -> None:
    """Trains a model with batch normalization, whose averages can be read by all workers together
    only.
    """
    cluster = {"cluster": {"worker": list(hosts)}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(3)
    random = np.random.RandomState(0)
    x = random.randn(64, 8).astype("float32")
    y = random.randint(0, 3, 64)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    every = keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")
    weights = keras.callbacks.ModelCheckpoint(
        f"{folder}/{{epoch}}.weights.h5", save_weights_only=True
    )
    rows = keras.callbacks.CSVLogger(f"{folder}/log.csv")
    board = keras.callbacks.TensorBoard(f"{folder}/board")

    tk_keras.fit(
        model,
        x,
        y,
        batch_size=16,
        epochs=EPOCHS,
        callbacks=[every, weights, rows, board],
        verbose=0,
        model_dir=f"{folder}/run",
    )
    if index == 0:
        np.save(f"{folder}/kernel.npy", model.layers[-1].kernel.numpy())
