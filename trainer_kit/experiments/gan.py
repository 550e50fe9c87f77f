"""A generative adversarial network (GAN) that draws digits, in one file.

Data: the 1,797 scanned digits of scikit-learn, 8 x 8 pixels; 360 of them are held out. To use
images of your own, return them from `load_images`, and change SHAPE.

Run: python -m trainer_kit.train --experiment=gan --mode=train_and_eval --model_dir=runs/gan

Expected: a `told_apart` of 0.67 (+- 0.03). It is the accuracy of telling generated images from
held-out ones by the nearest neighbour: 1.0 for an untrained generator, 0.5 for real images.

Cost: one minute on two CPU cores. The folder `samples` of the run has pictures of generated digits.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit as tk

SHAPE = (8, 8, 1)


@tk.configclass
class DigitsGanConfig(tk.GanConfig):
    """The settings of the task, with other defaults than those of a GanConfig.

    Attributes:
      width: The size of the hidden layers of both nets.
    """

    latent_size: int = 32
    r1_penalty: float = 1.0
    width: int = 256


@tk.register_task(DigitsGanConfig)
class DigitsGanTask(tk.GanTask):
    """Trains two nets against each other: one draws digits, one tells them from real ones.

    GanTask has the losses and the training step, which updates the discriminator, then the
    generator.
    """

    def build_generator(self) -> keras.Model:
        """Returns the net from latents [batch, latent_size] to images [batch, 8, 8, 1]."""
        return keras.Sequential(
            [
                keras.Input((self.task_config.latent_size,)),
                keras.layers.Dense(self.task_config.width, "relu"),
                keras.layers.Dense(self.task_config.width, "relu"),
                keras.layers.Dense(int(np.prod(SHAPE)), "tanh"),
                keras.layers.Reshape(SHAPE),
            ]
        )

    def build_discriminator(self) -> keras.Model:
        """Returns the net from images [batch, 8, 8, 1] to logits [batch, 1]; above 0 is real."""
        return keras.Sequential(
            [
                keras.Input(SHAPE),
                keras.layers.Flatten(),
                keras.layers.Dense(self.task_config.width, "leaky_relu"),
                keras.layers.Dense(self.task_config.width, "leaky_relu"),
                keras.layers.Dense(1),
            ]
        )

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns the real images to train on or, to evaluate, those held out."""
        train, held_out = load_images()
        return tk.ArraySource(train if params.is_training else held_out, params)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the measure of generated images; none in training, whose batches are small."""
        return [] if training else [NeighbourTest("told_apart")]


class NeighbourTest(keras.metrics.Mean):
    """The accuracy of telling real from generated images by the nearest other image.

    It is 0.5 if generated images lie among the real ones, and near 1 if they do not look like
    them, or if they are all alike. Neighbours are sought within a batch of one replica.
    """

    def update_state(self, real: Any, generated: Any, sample_weight: Any = None) -> None:
        """Adds a batch of real images, and as many generated ones."""
        images = tf.concat([real, generated], axis=0)
        is_real = tf.range(tf.shape(images)[0]) < tf.shape(real)[0]
        vectors = tf.reshape(images, [-1, np.prod(SHAPE)])
        distances = tf.norm(vectors[:, None] - vectors[None], axis=-1)
        distances += 1e9 * tf.eye(tf.shape(images)[0])  # an image is not its own neighbour
        nearest = tf.argmin(distances, axis=1)
        super().update_state(tf.gather(is_real, nearest) == is_real)


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images to train on and those held out, float32 [n, 8, 8, 1] in -1..1."""
    images = (load_digits().images / 8 - 1).astype(np.float32)[..., None]
    train, held_out = train_test_split(images, test_size=360, random_state=0)
    return train, held_out


@tk.register_experiment("gan")
def gan() -> tk.ExperimentConfig:
    """A GAN that draws digits."""
    train = {"is_training": True, "seed": 1, "global_batch_size": 128}
    held_out = {"is_training": False, "global_batch_size": 360}
    adam = {"optimizer": {"type": "adam", "adam": {"beta_1": 0.5}}, "learning_rate": 5e-4}
    trainer = {
        "train_steps": 6000,
        "steps_per_loop": 500,
        "validation_interval": 1000,
        "best_checkpoint_eval_metric": "told_apart",
        "best_checkpoint_metric_comp": "lower",
        "callbacks": [{"name": "sample_pictures"}],
        # Pictures are made with an average of the generator's weights, which changes less.
        "optimizers": {
            "generator": {**adam, "ema": {"average_decay": 0.995}},
            "discriminator": adam,
        },
    }
    data = {"train_data": train, "validation_data": held_out}
    return tk.ExperimentConfig(task=DigitsGanConfig()).replace(task=data, trainer=trainer)
