"""TaskSampler: draws the task that each training step trains, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from trainer_kit.config.schema.multitask import (
    AnnealingSampleConfig,
    ProportionalSampleConfig,
    TaskSamplingConfig,
)

BLOCK = 1024  # draws that are made at once: a call of a function costs as much as hundreds of draws
_FOREVER = 2**52  # blocks: more than any run will see
_LAST_ALPHA = 0.2


class TaskSampler:
    """Draws one of several tasks for each step; the same seed and step always draw the same task. Runs on the host.

    Args:
      config: How tasks are drawn.
      weights: The weight of each task.
      seed: The seed of the draws.

    Attributes:
      number_of_tasks: The number of tasks.
    """

    def __init__(self, config: TaskSamplingConfig, weights: Sequence[float], seed: int) -> None:
        self._config, self._weights, self._seed = config.get(), list(weights), seed
        self.number_of_tasks = len(self._weights)

    def draw_tasks(self, position: int) -> tf.data.Dataset:
        """Returns the endless dataset of the tasks of all steps from `position` on, counted from 0: int64 scalars."""
        first, used = divmod(position, BLOCK)
        blocks = tf.data.Dataset.range(first, _FOREVER)
        drawn = blocks.map(
            lambda block: self._block(block)[tf.where(block == first, used, 0) :]
        ).unbatch()
        return drawn.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def count_steps_per_task(self, position: int) -> list[int]:
        """Returns how many of the steps before `position` each task has trained; runs eagerly.

        All of these draws are made again, at about 40 million a second.
        """
        last, rest = divmod(position, BLOCK)

        def count(block: tf.Tensor) -> tf.Tensor:
            drawn = tf.cast(self._block(block)[: tf.where(block == last, rest, BLOCK)], tf.int32)
            return tf.math.bincount(drawn, minlength=tasks, maxlength=tasks, dtype=tf.int64)

        tasks = self.number_of_tasks
        none = tf.zeros([tasks], tf.int64)
        counted = (
            tf.data.Dataset.range(last + 1)
            .map(count)
            .reduce(none, lambda total, more: total + more)
        )
        return [int(number) for number in counted.numpy()]

    @tf.autograph.experimental.do_not_convert
    def _block(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the tasks of a block of steps, int64 [BLOCK]: a pure function of the block's number.

        Runs in graph.
        """
        seed = tf.stack([tf.constant(self._seed, tf.int64), block])
        drawn = tf.random.stateless_uniform([BLOCK], seed, dtype=tf.float64, alg="philox")
        shares = tf.cumsum(self._shares(block * BLOCK + tf.range(BLOCK, dtype=tf.int64)), axis=1)
        bounds = shares / shares[:, -1:]  # the last is exactly 1, which no draw reaches
        return tf.reduce_sum(tf.cast(drawn[:, tf.newaxis] >= bounds, tf.int64), axis=1)

    @tf.autograph.experimental.do_not_convert
    def _shares(self, steps: tf.Tensor) -> tf.Tensor:
        """Returns what the probabilities of the tasks are proportional to, float64 [steps or 1, tasks].

        Runs in graph.
        """
        weights = tf.constant([self._weights], tf.float64)
        if isinstance(self._config, ProportionalSampleConfig):
            return weights**self._config.alpha
        if isinstance(self._config, AnnealingSampleConfig):
            epochs = max(1, -(-self._config.total_steps // self._config.steps_per_epoch))
            epoch = tf.minimum(steps // self._config.steps_per_epoch, epochs - 1)
            alpha = 1.0 - (1.0 - _LAST_ALPHA) * tf.cast(epoch, tf.float64) / max(1, epochs - 1)
            return weights ** alpha[:, tf.newaxis]
        return tf.ones_like(weights)
