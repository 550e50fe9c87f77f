"""The losses of generative adversarial networks, as functions of the discriminator's logits.

Each function returns a float scalar, the mean over the batch; runs in graph, on a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.training.gan.model import unchanged_averages

DiscriminatorLoss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # of the logits of real and of generated examples
GeneratorLoss = Callable[[tf.Tensor], tf.Tensor]  # of the logits of generated examples


def _mean(values: Any) -> tf.Tensor:
    return tf.reduce_mean(values)


# By name. Sources: Goodfellow et al. 2014 (arXiv 1406.2661), Mao et al. 2016 (1611.04076), Lim and Ye 2017 (1705.02894)
# and Arjovsky et al. 2017 (1701.07875).
DISCRIMINATOR_LOSSES: dict[str, DiscriminatorLoss] = {
    "non_saturating": lambda real, fake: _mean(tf.nn.softplus(-real)) + _mean(tf.nn.softplus(fake)),
    "least_squares": lambda real, fake: 0.5 * (_mean((real - 1.0) ** 2) + _mean(fake**2)),
    "hinge": lambda real, fake: _mean(tf.nn.relu(1.0 - real)) + _mean(tf.nn.relu(1.0 + fake)),
    "wasserstein": lambda real, fake: _mean(fake) - _mean(real),
}
GENERATOR_LOSSES: dict[str, GeneratorLoss] = {
    "non_saturating": lambda fake: _mean(tf.nn.softplus(-fake)),
    "least_squares": lambda fake: 0.5 * _mean((fake - 1.0) ** 2),
    "hinge": lambda fake: -_mean(fake),
    "wasserstein": lambda fake: -_mean(fake),
}


def squared_gradient(discriminator: Any, examples: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the discriminator's squared gradient norm at `examples`: R1 (arXiv 1801.04406) without 1/2.

    Runs in graph, on a replica. Averages of batch normalization keep their values.

    Args:
      discriminator: The net, which returns a logit for each example.
      examples: Float examples, [batch, ...].
    """
    with tf.GradientTape() as tape, unchanged_averages(discriminator):
        tape.watch(examples)
        total = tf.reduce_sum(discriminator(examples, training=True))
    gradient = tape.gradient(total, examples)
    return tf.reduce_mean(tf.reduce_sum(tf.reshape(gradient, [tf.shape(gradient)[0], -1]) ** 2, axis=1))
