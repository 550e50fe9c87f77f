"""The task of `gan_rings`: the points, the two nets, and what is measured of generated points."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import trainer_kit
from trainer_kit import DataConfig

TRAIN_POINTS = 20_000
VALIDATION_POINTS = 4_000
NEAR = 3.0  # a point belongs to a center within this number of standard deviations
LEAST_SHARE = 0.01  # a center is covered if this share of all generated points belongs to it


class GanRingsTask(trainer_kit.GanTask):
    """Generates points.

    The metrics are `modes`, the number of covered centers, `near`, the share of points that are
    near one, and `distance`, the energy distance of the generated points from the real ones, which
    is 0 for the same distribution.
    """

    def build_generator(self) -> keras.Model:
        """Returns the net from latents to points, float32 [batch, 2]."""
        return self._build_net("generator", inputs=self.task_config.latent_size, outputs=2)

    def build_discriminator(self) -> keras.Model:
        """Returns the net from points to logits, float32 [batch, 1]."""
        return self._build_net("discriminator", inputs=2, outputs=1)

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns the points to train on or, to evaluate, those to compare with."""
        del input_context  # the source gets it when it is asked for its dataset
        count, seed = (TRAIN_POINTS, 1) if params.is_training else (VALIDATION_POINTS, 2)
        return trainer_kit.ArraySource(
            sample_ring_points(self.compute_centers(), self.task_config.sigma, count, seed), params
        )

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the metrics of generated points.

        Training has none, since its batches are too small.
        """
        if training:
            return []
        centers = self.compute_centers()
        sigma = self.task_config.sigma
        return [CoveredCenters(centers, sigma), NearShare(centers, sigma), EnergyDistance()]

    def compute_centers(self) -> np.ndarray:
        """Returns the centers of the Gaussians, float32 [centers, 2]."""
        angles = 2 * np.pi * np.arange(self.task_config.centers) / self.task_config.centers
        return (
            self.task_config.radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        ).astype(np.float32)

    def picture(self, samples: np.ndarray) -> np.ndarray:
        """Returns a scatter plot of the points.

        A circle of three standard deviations is around each center.
        """
        figure = Figure(figsize=(4, 4), dpi=100, layout="tight")
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot(aspect="equal")
        limit = 1.5 * self.task_config.radius
        axes.set(xlim=(-limit, limit), ylim=(-limit, limit))
        near = NEAR * self.task_config.sigma
        angles = np.linspace(0, 2 * np.pi, 60)
        for x, y in self.compute_centers():
            axes.plot(
                x + near * np.cos(angles),
                y + near * np.sin(angles),
                color="tab:orange",
                linewidth=1,
            )
        axes.scatter(samples[:, 0], samples[:, 1], s=2, color="tab:blue")
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _build_net(self, name: str, inputs: int, outputs: int) -> keras.Model:
        hidden = [keras.layers.Dense(self.task_config.hidden, activation="relu") for _ in range(2)]
        return keras.Sequential(
            [keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)], name=name
        )


class _NearCenters(keras.metrics.Metric):
    """A metric of the numbers of generated points that are near each center.

    Args:
      centers: The centers, float32 [centers, 2].
      sigma: The standard deviation around each center.
      name: The name of the metric.
    """

    def __init__(self, centers: np.ndarray, sigma: float, name: str) -> None:
        super().__init__(name=name)
        self._centers = centers
        self._near = NEAR * sigma
        self.counts = self.add_weight(shape=(len(centers),), initializer="zeros", name="counts")
        self.points = self.add_weight(shape=(), initializer="zeros", name="points")

    def update_state(self, real: Any, generated: Any, sample_weight: Any = None) -> None:
        """Adds generated points, float32 [batch, 2]; the real ones are not used.

        Runs in a graph, on a replica.
        """
        del real, sample_weight
        near = tf.norm(generated[:, None] - self._centers[None], axis=-1) <= self._near
        self.counts.assign_add(tf.reduce_sum(tf.cast(near, tf.float32), axis=0))
        self.points.assign_add(tf.cast(tf.shape(generated)[0], tf.float32))


class CoveredCenters(_NearCenters):
    """The number of centers that a share of at least LEAST_SHARE of the points is near to."""

    def __init__(self, centers: np.ndarray, sigma: float) -> None:
        super().__init__(centers, sigma, "modes")

    def result(self) -> tf.Tensor:
        """Returns the number, a float32 scalar."""
        return tf.reduce_sum(
            tf.cast(self.counts >= LEAST_SHARE * tf.maximum(self.points, 1.0), tf.float32)
        )


class NearShare(_NearCenters):
    """The share of the points that are near a center."""

    def __init__(self, centers: np.ndarray, sigma: float) -> None:
        super().__init__(centers, sigma, "near")

    def result(self) -> tf.Tensor:
        """Returns the share, a float32 scalar."""
        return tf.math.divide_no_nan(tf.reduce_sum(self.counts), tf.convert_to_tensor(self.points))


class EnergyDistance(keras.metrics.Mean):
    """The energy distance of generated points from real ones, the mean over batches.

    The source is Szekely and Rizzo 2013.

    With distances d it is 2 E d(real, generated) - E d(real, real) - E d(generated, generated),
    within the batch of a replica.
    """

    def __init__(self) -> None:
        super().__init__("distance")

    def update_state(self, real: Any, generated: Any, sample_weight: Any = None) -> None:
        """Adds a batch of real and one of generated points, float32 [batch, 2].

        Runs in a graph, on a replica.
        """
        del sample_weight
        apart = 2.0 * _mean_distance(real, generated) - _mean_distance(real, real)
        examples = tf.shape(real)[0]
        values = tf.fill(
            [examples], apart - _mean_distance(generated, generated)
        )  # none for a batch without examples
        super().update_state(values)


def _mean_distance(points: Any, others: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.norm(points[:, None] - others[None], axis=-1))


def sample_ring_points(centers: np.ndarray, sigma: float, count: int, seed: int) -> np.ndarray:
    """Returns points around the centers in equal shares, float32 [count, 2].

    One seed gives the same points.
    """
    random = np.random.default_rng(seed)
    places = centers[np.arange(count) % len(centers)]
    return (places + random.normal(0, sigma, (count, 2))).astype(np.float32)
