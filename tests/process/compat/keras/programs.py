"""Programs in the manner of Keras's guides; each runs with Keras itself and with trainer_kit, which is killed in it.

Each has states of kinds of their own. killed_fit.py has callbacks, tests/engine/compat/keras/test_programs.py more
programs. A program takes a Door, makes model and data from one seed, trains for four epochs of ten steps and returns
the History.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.process.compat.keras import models

EPOCHS, STEPS, BATCH = 4, 10, 16
EXAMPLES = STEPS * BATCH - 5  # the last batch of an epoch is a smaller one
WEIGHTS = {0: 1.0, 1: 2.5, 2: 0.5}  # of the classes


class Door(Protocol):
    """What a program trains with."""

    def fit(self, model: Any, *arguments: Any, **options: Any) -> Any:
        """Trains as `model.fit` does, and returns its History."""

    def train_loop(self, train_step: Any, train_ds: Any, **options: Any) -> Any:
        """Trains as a loop by hand does, and returns a History."""


def begin() -> None:
    """Makes names and random numbers of a program independent of the programs before it."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)


def examples(seed: int = 0, number: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns features, float32 [number, 8], and classes, int64 [number], which a model can learn."""
    random = np.random.RandomState(seed)
    x = random.randn(number, 8).astype(np.float32)
    return x, x[:, :3].argmax(1)


def batches(*arrays: Any, shuffle: bool = True) -> tf.data.Dataset:
    """Returns a dataset of batches, in another order in each epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])
    return (dataset.shuffle(EXAMPLES, seed=5) if shuffle else dataset).batch(BATCH)


def classifier(*between: keras.layers.Layer) -> keras.Model:
    """Returns a model of three classes, with dropout and batch normalization."""
    first = [keras.Input((8,)), layers.BatchNormalization(), layers.Dropout(0.2)]
    return keras.Sequential([*first, *between, layers.Dense(3)])


def cross_entropy(**options: Any) -> keras.losses.Loss:
    """Returns the loss of `classifier`."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def averaged_weights(door: Door) -> Any:
    """A callback swaps in the moving average of the optimizer; a dataset is shuffled, and classes have weights."""
    begin()
    model = classifier()
    adam = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    model.compile(adam, cross_entropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    data, validation = batches(*examples()), batches(*examples(1, 40), shuffle=False)
    options = {"validation_data": validation, "callbacks": callbacks, "class_weight": WEIGHTS, "verbose": 0}
    return door.fit(model, data, epochs=EPOCHS, **options)


def gan(door: Door) -> Any:
    """Two models that are not built have an optimizer each; random numbers come from a seed generator."""
    begin()
    model = models.Gan()
    model.compile(
        d_optimizer=keras.optimizers.Adam(1e-2, beta_1=0.5),
        g_optimizer=keras.optimizers.Adam(3e-3, beta_1=0.5),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return door.fit(model, examples()[0], batch_size=BATCH, epochs=EPOCHS, verbose=0)


def loop_by_hand(door: Door) -> Any:
    """The functions of a loop by hand: they use two models, optimizers, a counter and metrics around them."""
    begin()
    model, critic = classifier(models.ActivityLoss(1e-2)), keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    optimizer, critic_optimizer = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2)
    count, loss_fn = tf.Variable(0.0, trainable=False), cross_entropy()
    train_metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    val_metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        count.assign_add(1.0)
        with tf.GradientTape(persistent=True) as tape:
            logits = model(x, training=True)
            score = tf.reduce_mean(critic(logits)) / count
            loss = loss_fn(y, logits) + sum(model.losses) - score
        for one, by, value in ((model, optimizer, loss), (critic, critic_optimizer, score)):
            gradients = tape.gradient(value, one.trainable_weights)
            by.apply_gradients(zip(gradients, one.trainable_weights, strict=True))
        train_metric.update_state(y, logits)
        return loss

    def test_step(x: Any, y: Any) -> None:
        val_metric.update_state(y, model(x, training=False))

    x, y = examples(number=STEPS * BATCH)
    return door.train_loop(
        train_step, batches(x, y, shuffle=False), epochs=EPOCHS, model=model, optimizer=optimizer,
        metrics=[train_metric], test_step=test_step, val_dataset=batches(*examples(1, 40), shuffle=False),
        val_metrics=[val_metric],
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[Door], Any]] = {one.__name__: one for one in (averaged_weights, gan, loop_by_hand)}
