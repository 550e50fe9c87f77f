"""Models, a layer and a callback of the programs, as users of Keras write them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


class GapOfEpochs(keras.callbacks.Callback):
    """Adds to the logs by how much the loss has changed since the epoch before, and counts the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.last = 0, 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["change"], self.last = logs["loss"] - self.last, logs["loss"]
        logs["begun"] = self.begun


class ActivityLoss(layers.Layer):
    """Adds the sum of its inputs to the losses of the model."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.rate * ops.mean(inputs))
        return inputs


class OwnSteps(keras.Model):
    """A regression with its own steps; it is not built before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = layers.Dense(16, activation="relu"), layers.Dropout(0.2), layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(inputs), training=training))

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean(ops.square(y - predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._noted(loss, y, predicted)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x, training=False)
        return self._noted(ops.mean(ops.square(y - predicted)), y, predicted)

    def _noted(self, loss: Any, y: Any, predicted: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, predicted)
        return {one.name: one.result() for one in self.metrics}


class Gan(keras.Model):
    """A generator and a discriminator of vectors, float32 [batch, 8]."""

    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.latent = latent
        self.seeds = keras.random.SeedGenerator(7)
        self.generator = keras.Sequential([keras.Input((latent,)), layers.Dense(16, "relu"), layers.Dense(8)])
        self.discriminator = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real: Any) -> dict[str, Any]:
        size = ops.shape(real)[0]
        noise = keras.random.normal((size, self.latent), seed=self.seeds)
        both = ops.concatenate([self.generator(noise), real])
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))])
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        noise = keras.random.normal((size, self.latent), seed=self.seeds)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


class Vae(keras.Model):
    """A variational autoencoder of vectors, float32 [batch, 8]."""

    def __init__(self, latent: int = 2) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(11)
        self.encoder = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(2 * latent)])
        self.decoder = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(8)])
        names = ("loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(data), 2, axis=-1)
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
            decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            reconstruction = ops.mean(ops.sum(ops.square(data - decoded), axis=1))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = reconstruction + kl
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        for tracker, value in zip(self.trackers, (loss, reconstruction, kl), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Distiller(keras.Model):
    """Trains a student on the labels and on what a teacher says."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(
        self, optimizer: Any, metrics: Any, student_loss_fn: Any, distillation_loss_fn: Any, alpha: float,
        temperature: float,
    ) -> None:  # fmt: skip
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        said = self.teacher(x, training=False)
        softened = [ops.softmax(one / self.temperature, axis=1) for one in (said, y_pred)]
        distillation = self.distillation_loss_fn(*softened) * self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.student(inputs, training=training)
