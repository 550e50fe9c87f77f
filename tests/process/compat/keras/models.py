"""A model and a layer of the programs, as users of Keras write them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


class ActivityLoss(layers.Layer):
    """Adds the sum of its inputs to the losses of the model."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.rate * ops.mean(inputs))
        return inputs


class Gan(keras.Model):
    """A generator and a discriminator of vectors, float32 [batch, 8], which their first batches build."""

    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.latent = latent
        self.seeds = keras.random.SeedGenerator(7)
        self.generator = keras.Sequential([layers.Dense(8)])
        self.discriminator = keras.Sequential([layers.Dense(1)])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

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
        for tracker, value in zip(self.trackers, (d_loss, g_loss), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}
