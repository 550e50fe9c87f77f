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
            is_first = block == first_block
            begin = tf.where(is_first, used_draws, 0)
            block_tasks = self._block(block)
            return block_tasks[begin:]

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
            is_last = block == last_block
            end = tf.where(is_last, remaining_draws, BLOCK)
            block_tasks = self._block(block)
            tasks = tf.cast(block_tasks[:end], tf.int32)
            return tf.math.bincount(
                tasks, minlength=number_of_tasks, maxlength=number_of_tasks, dtype=tf.int64
            )

        blocks = tf.data.Dataset.range(last_block + 1)
        zeros = tf.zeros([number_of_tasks], tf.int64)
        block_counts = blocks.map(count)
        totals = block_counts.reduce(zeros, lambda total, more: total + more)
        return [int(total) for total in totals.numpy()]

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
            steps_per_epoch = config.steps_per_epoch
            # An epoch that the last step cuts counts as a whole one.
            epochs = -(-config.total_steps // steps_per_epoch)
            last_epoch = max(1, epochs) - 1

            epoch = tf.minimum(steps // steps_per_epoch, last_epoch)
            range_of_alpha = 1.0 - _LAST_ALPHA
            decay = range_of_alpha * tf.cast(epoch, tf.float64)
            alpha = 1.0 - decay / max(1, last_epoch)
            exponents = alpha[:, tf.newaxis]
            shares = weights**exponents
        else:
            shares = tf.ones_like(weights)

        # The last bound is exactly 1, which no draw reaches.
        sums = tf.cumsum(shares, axis=1)
        totals = sums[:, -1:]
        bounds = sums / totals

        # The number of bounds that a draw has reached is the index of its task.
        draws = draws[:, tf.newaxis]
        has_reached = tf.cast(draws >= bounds, tf.int64)
        return tf.reduce_sum(has_reached, axis=1)
