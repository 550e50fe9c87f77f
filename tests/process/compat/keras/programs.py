"""Programs in the manner of Keras's guides, which may kill their process; each has states of kinds
of their own.

A program takes a folder and callbacks, makes model and data from one seed, trains for four epochs
of ten steps and returns the History and all that has variables. `killed_fit.py` has callbacks, and
tests/engine/compat/keras/test_programs.py compares with Keras.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.engine.compat.keras import keras_programs
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.compat import keras as tk_keras

EPOCHS = 4
STEPS = 10
BATCH = 16
LOOPS = {"steps_per_loop": 4, "checkpoint_interval": 4}  # an epoch is no multiple of a loop


class Kill(Callback):
    """Kills the process at the end of the loop that reaches a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns features, float32 [160, 8], and classes, int64 [160], which a model can learn."""
    x = np.random.RandomState(0).randn(STEPS * BATCH, 8).astype(np.float32)
    return x, x[:, :3].argmax(1)


def classifier(*hidden: keras.Layer) -> keras.Model:
    """Returns a model of three classes, of one layer behind `hidden`."""
    return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(3)])


def averaged_weights(folder: str, callbacks: list[Any]) -> Any:
    """A callback swaps in the moving average of the optimizer; a dataset is shuffled, and classes
    have weights.
    """
    model = classifier(layers.BatchNormalization(), layers.Dropout(0.2))
    sgd = keras.optimizers.SGD(1e-2, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    model.compile(
        sgd, keras_programs.CROSSENTROPY, weighted_metrics=["accuracy"], jit_compile=False
    )
    data = tf.data.Dataset.from_tensor_slices(examples()).shuffle(200, seed=5).batch(BATCH)
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *callbacks]
    options = {
        "callbacks": callbacks,
        "class_weight": {0: 1.0, 1: 2.5, 2: 0.5},
        "verbose": 0,
    }
    history = tk_keras.fit(
        model, data, epochs=EPOCHS, **options, model_dir=folder, trainer=LOOPS, best=False
    )
    return history, [model, sgd]


def gan(folder: str, callbacks: list[Any]) -> Any:
    """Two models have an optimizer each; random numbers come from a seed generator."""
    options = {"batch_size": BATCH, "epochs": EPOCHS, "callbacks": callbacks, "verbose": 0}
    model = keras_programs.gan()
    history = tk_keras.fit(model, examples()[0], **options, model_dir=folder, trainer=LOOPS)
    return history, [model, model.d_optimizer, model.g_optimizer]


def loop_by_hand(folder: str, callbacks: list[Any]) -> Any:
    """The functions of a loop by hand: they use two models, optimizers, a counter and metrics
    around them.
    """
    model = classifier(layers.Dropout(0.2))
    critic = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)
    critic_optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    count = tf.Variable(0.0, trainable=False)
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        count.assign_add(1.0)
        with tf.GradientTape(persistent=True) as tape:
            logits = model(x, training=True)
            score = tf.reduce_mean(critic(logits)) / count
            loss = keras_programs.CROSSENTROPY(y, logits) - score
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        gradients = tape.gradient(score, critic.trainable_weights)
        critic_optimizer.apply(gradients, critic.trainable_weights)
        metric.update_state(y, logits)
        return loss

    options = {"epochs": EPOCHS, "metrics": [metric], "callbacks": callbacks, "verbose": 0}
    data = tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH)
    history = tk_keras.train_loop(
        train_step,
        data,
        model=model,
        optimizer=optimizer,
        **options,
        model_dir=folder,
        trainer=LOOPS,
    )
    return history, [model, critic, critic_optimizer, optimizer]


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (averaged_weights, gan, loop_by_hand)
}


def run_killed(name: str, folder: Path, step: int) -> None:
    """Runs a program that kills its process."""
    keras.utils.set_random_seed(3)
    PROGRAMS[name](str(folder / "again" / name), [Kill(step)])


def run_to_the_end(folder: Path) -> None:
    """Runs the killed programs to their end, then all programs whole; writes history and bits to a
    file each.
    """
    for kind in ("again", "whole"):
        results = {}
        for name, program in PROGRAMS.items():
            keras.utils.clear_session()
            keras.utils.set_random_seed(3)
            history, parts = program(str(folder / kind / name), [])
            variables = [variable for part in parts for variable in part.variables]
            bits = [
                tf.convert_to_tensor(variable).numpy().tobytes().hex() for variable in variables
            ]
            results[name] = {"history": history.history, "epoch": history.epoch, "bits": bits}
        (folder / f"{kind}.json").write_text(json.dumps(results))
