"""The task of `gan_digits`: the images, the two nets, and what is measured of generated images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import trainer_kit
from trainer_kit import DataConfig

HELD_OUT = 360  # a fifth of the 1,797 images
SIDE = 8  # pixels


class GanDigitsTask(trainer_kit.GanTask):
    """Generates images of digits; the metrics are `fidelity_distance` and `coverage_distance`.

    The first is the mean distance of a generated image from the nearest real one of its batch: it
    is small if all images look like digits. The second is that of a real image from the nearest
    generated one: it is small if all kinds of digits are generated. Distances are root mean squares
    over pixels.
    """

    def build_generator(self) -> keras.Model:
        """Returns the net from latents to images, float32 [batch, 8, 8, 1] in -1..1."""
        layers = keras.layers
        channels = self.task_config.channels
        return keras.Sequential(
            [
                keras.Input((self.task_config.latent_size,)),
                layers.Dense(4 * channels, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Reshape((2, 2, channels)),
                layers.Conv2DTranspose(channels // 2, 4, strides=2, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Conv2DTranspose(channels // 4, 4, strides=2, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Conv2D(1, 3, padding="same", activation="tanh"),
            ],
            name="generator",
        )

    def build_discriminator(self) -> keras.Model:
        """Returns the net from images to logits, float32 [batch, 1]."""
        layers = keras.layers
        channels = self.task_config.channels
        return keras.Sequential(
            [
                keras.Input((SIDE, SIDE, 1)),
                layers.Conv2D(channels // 2, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2D(channels, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="discriminator",
        )

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns the images to train on or, if not `params.is_training`, those held out."""
        del input_context  # the source gets it when it is asked for its dataset
        images = load_digit_images()
        return trainer_kit.ArraySource(
            images[:-HELD_OUT] if params.is_training else images[-HELD_OUT:], params
        )

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the two distances; none for training, whose batches are too small."""
        return [] if training else [FidelityDistance(), CoverageDistance()]


class FidelityDistance(keras.metrics.Mean):
    """The mean distance of a generated image from the nearest real image of its batch."""

    def __init__(self) -> None:
        super().__init__("fidelity_distance")

    def update_state(self, real: Any, generated: Any, sample_weight: Any = None) -> None:
        """Adds a batch of real and one of generated images, [batch, 8, 8, 1].

        Runs in a graph, on a replica.
        """
        super().update_state(tf.reduce_min(_distances(generated, real), axis=1), sample_weight)


class CoverageDistance(keras.metrics.Mean):
    """The mean distance of a real image from the nearest generated image."""

    def __init__(self) -> None:
        super().__init__("coverage_distance")

    def update_state(self, real: Any, generated: Any, sample_weight: Any = None) -> None:
        """Adds a batch of real and one of generated images, [batch, 8, 8, 1].

        Runs in a graph, on a replica.
        """
        super().update_state(tf.reduce_min(_distances(real, generated), axis=1), sample_weight)


def _distances(images: Any, others: Any) -> tf.Tensor:
    """Returns the distance of each image from each of the others, float32 [images, others]."""
    return tf.sqrt(tf.reduce_mean((images[:, None] - others[None]) ** 2, axis=(2, 3, 4)))


def load_digit_images() -> np.ndarray:
    """Returns the images, float32 [1797, 8, 8, 1] in -1..1.

    Their order does not depend on the digit.
    """
    images = (load_digits().images / 8 - 1).astype(np.float32)[..., None]
    return images[np.random.default_rng(0).permutation(len(images))]
