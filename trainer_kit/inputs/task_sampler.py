"""TaskSampler: draws the task that each training step trains, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from trainer_kit.config.schema.multitask import (
    AnnealingSampleConfig,
    ProportionalSampleConfig,
    TaskSamplingConfig,
)
from trainer_kit.inputs.dataset_structure import declare_endless

# The number of draws that are made at once. A function call costs as much as hundreds of draws.
BLOCK = 1024
# A number of blocks that no run will reach.
_FOREVER = 2**52
_LAST_ALPHA = 0.2


class TaskSampler:
    """Draws one of several tasks for each step. Runs on the host.

    The same seed and step always draw the same task.

    Args:
      config: How tasks are drawn.
      weights: The weight of each task.
      seed: The seed of the draws.

    Attributes:
      number_of_tasks: The number of tasks.
    """

    def __init__(self, config: TaskSamplingConfig, weights: Sequence[float], seed: int) -> None:
        self._config = config.get()
        self._weights = list(weights)
        self._seed = seed
        self.number_of_tasks = len(self._weights)

    def draw_tasks(self, position: int) -> tf.data.Dataset:
        """Returns the endless dataset of the tasks of all steps from `position` on.

        Args:
          position: The index of the first step, counted from 0.

        Returns:
          A dataset of int64 scalars, the indices of the tasks.
        """
        first_block, used_draws = divmod(position, BLOCK)
        blocks = tf.data.Dataset.range(first_block, _FOREVER)

        def draw(block: tf.Tensor) -> tf.Tensor:
            # Only the first block has draws before the position.
            begin = tf.where(block == first_block, used_draws, 0)
            return self._block(block)[begin:]

        tasks = blocks.map(draw).unbatch()
        return declare_endless(tasks)

    def count_steps_per_task(self, position: int) -> list[int]:
        """Returns how many of the steps before `position` each task has trained. Runs eagerly.

        All of these draws are made again, at about 40 million a second.
        """
        last_block, remaining_draws = divmod(position, BLOCK)
        number_of_tasks = self.number_of_tasks

        def count(block: tf.Tensor) -> tf.Tensor:
            # Only the last block has draws after the position.
            draws = tf.where(block == last_block, remaining_draws, BLOCK)
            tasks = tf.cast(self._block(block)[:draws], tf.int32)
            return tf.math.bincount(
                tasks, minlength=number_of_tasks, maxlength=number_of_tasks, dtype=tf.int64
            )

        blocks = tf.data.Dataset.range(last_block + 1)
        zeros = tf.zeros([number_of_tasks], tf.int64)
        counts = blocks.map(count).reduce(zeros, lambda total, more: total + more)
        return [int(number) for number in counts.numpy()]

    @tf.autograph.experimental.do_not_convert
    def _block(self, block: tf.Tensor) -> tf.Tensor:
        """Returns the tasks of a block of steps, int64 [BLOCK].

        They are a pure function of the block's number, an int64 scalar. Runs in graph.
        """
        run_seed = tf.constant(self._seed, tf.int64)
        seed = tf.stack([run_seed, block])
        draws = tf.random.stateless_uniform([BLOCK], seed, dtype=tf.float64, alg="philox")

        # The shares are proportional to the probabilities of tasks, float64 [steps or 1, tasks].
        config = self._config
        weights = tf.constant([self._weights], tf.float64)
        if isinstance(config, ProportionalSampleConfig):
            shares = weights**config.alpha
        elif isinstance(config, AnnealingSampleConfig):
            # Alpha falls from 1 in the first epoch to _LAST_ALPHA in the last.
            first_step = block * BLOCK
            steps = first_step + tf.range(BLOCK, dtype=tf.int64)
            epochs = max(1, -(-config.total_steps // config.steps_per_epoch))
            last_epoch = epochs - 1
            epoch = tf.minimum(steps // config.steps_per_epoch, last_epoch)
            decay = (1.0 - _LAST_ALPHA) * tf.cast(epoch, tf.float64)
            alpha = 1.0 - decay / max(1, last_epoch)
            shares = weights ** alpha[:, tf.newaxis]
        else:
            shares = tf.ones_like(weights)

        # The last bound is exactly 1, which no draw reaches.
        sums = tf.cumsum(shares, axis=1)
        bounds = sums / sums[:, -1:]
        is_above = draws[:, tf.newaxis] >= bounds
        return tf.reduce_sum(tf.cast(is_above, tf.int64), axis=1)
