"""Gan: a generator and a discriminator as one Keras model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


class Gan(keras.Model):
    """Two nets that train against each other. Called on random numbers, it generates examples.

    Args:
      generator: The net from latents, float32 [batch, latent_size], to examples, [batch, ...] of floating point.
      discriminator: The net from examples to logits, [batch] or [batch, 1].
      latent_size: The number of random numbers for one example.

    Attributes:
      generator, discriminator, latent_size: The arguments.
    """

    def __init__(self, generator: keras.Model, discriminator: keras.Model, latent_size: int) -> None:
        latents = keras.Input((latent_size,), name="latents")
        examples = generator(latents)
        super().__init__(latents, examples, name="gan")
        discriminator(examples)  # builds it
        self.generator, self.discriminator, self.latent_size = generator, discriminator, latent_size
        self._seeds = keras.random.SeedGenerator()

    @property
    def latents_spec(self) -> tf.TensorSpec:
        """The spec of a batch of latents."""
        return tf.TensorSpec([None, self.latent_size], tf.float32)

    @tf.autograph.experimental.do_not_convert
    def latents(self, count: Any) -> tf.Tensor:
        """Returns new random numbers, float32 [count, latent_size], different ones on each replica.

        Runs eagerly or in graph.

        Args:
          count: The number of examples to generate from them.
        """
        seed = tf.cast(self._seeds.next(), tf.int64)
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(context.replica_id_in_sync_group, tf.int64))
        return tf.random.stateless_normal(
            [count, self.latent_size], seed
        )  # naming an algorithm takes 13 operations more


@contextlib.contextmanager
def unchanged_averages(net: Any) -> Iterator[None]:
    """Keeps the averages of a net's batch normalization as they are, whatever is computed in this context.

    Runs in graph.

    Args:
      net: A Keras model. Its variables that are not trained and are of floating point keep their values.
    """
    variables: Sequence[Any] = [one for one in net.non_trainable_variables if tf.as_dtype(one.dtype).is_floating]
    before = [tf.identity(one) for one in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
