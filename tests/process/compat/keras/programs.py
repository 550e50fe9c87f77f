"""Programs in the manner of Keras's guides; each runs with Keras itself and with trainer_kit.

A program takes a Door, makes model and data from one seed, trains for four epochs of ten steps and returns the History.
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
    first = [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.2)]
    return keras.Sequential([*first, *between, layers.Dense(3)])


def cross_entropy(**options: Any) -> keras.losses.Loss:
    """Returns the loss of `classifier`."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fit_with_callbacks(door: Door) -> Any:
    """Callbacks change the rate, stop the run in its last epoch but one and add logs."""
    begin()
    model = classifier()
    model.compile("adam", cross_entropy(), metrics=["accuracy"])
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch else rate),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.3),
        keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.5, restore_best_weights=True),
        models.GapOfEpochs(),
    ]
    x, y = examples(number=200)
    return door.fit(
        model, x, y, batch_size=BATCH, epochs=EPOCHS + 1, validation_split=0.2, callbacks=callbacks, verbose=0
    )


def averaged_weights(door: Door) -> Any:
    """A callback swaps in the moving average of the optimizer for evaluations and between epochs."""
    begin()
    model = classifier()
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9), cross_entropy(), metrics=["accuracy"])
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    x, y = examples()
    options = {"validation_data": examples(1, 40), "callbacks": callbacks, "verbose": 0}
    return door.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, **options)


def sample_weights(door: Door) -> Any:
    """Each example has its weight, in the loss and in weighted metrics, in training and validation."""
    begin()
    model = classifier()
    model.compile("sgd", cross_entropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    x, y = examples()
    weight = np.where(y == 1, 2.0, 0.5)
    validation = (*examples(1, 40), np.linspace(0.1, 2, 40))
    options = {"sample_weight": weight, "validation_data": validation, "shuffle": False}
    return door.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, **options)


def class_weights(door: Door) -> Any:
    """Each class has its weight; the data is a tf.data.Dataset that is shuffled."""
    begin()
    model = classifier()
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0), cross_entropy(), weighted_metrics=["accuracy"])
    data, validation = batches(*examples()), batches(*examples(1, 40), shuffle=False)
    return door.fit(model, data, epochs=EPOCHS, validation_data=validation, class_weight=WEIGHTS, verbose=0)


def custom_train_step(door: Door) -> Any:
    """A subclassed model has its own training step, evaluation step and metrics."""
    begin()
    model = models.OwnSteps()
    model.compile(keras.optimizers.Adam(1e-2))
    x, _ = examples()
    size = x.sum(1, keepdims=True)
    data, validation = batches(x, size), batches(x[:40], size[:40], shuffle=False)
    return door.fit(model, data, epochs=EPOCHS, validation_data=validation, verbose=0)


def gan(door: Door) -> Any:
    """Two models have an optimizer each; the step returns plain scalars."""
    begin()
    model = models.Gan()
    model.compile(
        d_optimizer=keras.optimizers.Adam(1e-2, beta_1=0.5),
        g_optimizer=keras.optimizers.Adam(3e-3, beta_1=0.5),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return door.fit(model, batches(examples()[0]), epochs=EPOCHS, verbose=0)


def vae(door: Door) -> Any:
    """A variational autoencoder has three trackers, and random numbers from a seed generator."""
    begin()
    model = models.Vae()
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    return door.fit(model, examples()[0], batch_size=BATCH, epochs=EPOCHS, verbose=0)


def distillation(door: Door) -> Any:
    """`compile` has arguments of its own, and `compute_loss` uses a teacher, which is not trained."""
    begin()
    teacher = classifier()
    teacher.trainable = False
    model = models.Distiller(student=classifier(), teacher=teacher)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=cross_entropy(),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    x, y = examples()
    return door.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=examples(1, 40), verbose=0)


def loss_in_a_layer(door: Door) -> Any:
    """A layer adds a loss to that of `compile`, in a model of two inputs and two outputs."""
    begin()
    wide, deep = keras.Input((8,), name="wide"), keras.Input((8,), name="deep")
    hidden = models.ActivityLoss(1e-2)(layers.Dense(16, activation="relu")(deep))
    both = layers.Concatenate()([wide, layers.Dropout(0.2)(hidden)])
    outputs = {"kind": layers.Dense(3, name="kind")(both), "size": layers.Dense(1, name="size")(both)}
    model = keras.Model({"wide": wide, "deep": deep}, outputs)
    model.compile("adam", {"kind": cross_entropy(), "size": "mse"}, loss_weights={"kind": 1.0, "size": 0.2})
    x, y = examples()
    inputs, targets = {"wide": x, "deep": x[:, ::-1]}, {"kind": y, "size": x.sum(1, keepdims=True)}
    return door.fit(
        model, inputs, targets, batch_size=BATCH, epochs=EPOCHS, validation_data=(inputs, targets),
        validation_freq=2, verbose=0,
    )  # fmt: skip


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


PROGRAMS: dict[str, Callable[[Door], Any]] = {
    one.__name__: one
    for one in (
        fit_with_callbacks, averaged_weights, sample_weights, class_weights, custom_train_step, gan, vae, distillation,
        loss_in_a_layer, loop_by_hand,
    )
}  # fmt: skip
# Programs with a state of a kind of their own: averages that are swapped, the order of a dataset, two optimizers,
# seeds, what a loop by hand uses. test_killed_fit.py has the callbacks.
KILLED = ("averaged_weights", "class_weights", "gan", "vae", "loop_by_hand")
