"""DrawnTasks: the tasks that a task sampler of Model Garden draws."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.task_sampler import BLOCK, TaskSampler


class DrawnTasks(TaskSampler):
    """Draws the tasks that Model Garden's interleaving trainer draws.

    Args:
      sampler: A task sampler of Model Garden.
      number_of_tasks: The number of tasks.
    """

    def __init__(self, sampler: Any, number_of_tasks: int) -> None:
        self._sampler, self.number_of_tasks = sampler, number_of_tasks

    @tf.autograph.experimental.do_not_convert
    def _block(self, block: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(self._draw, block * BLOCK + tf.range(BLOCK, dtype=tf.int64), fn_output_signature=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def _draw(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the number of the task trained after `step` steps, an int64 scalar; runs in graph.

        A draw beyond the last bound gives the last task: rounded sums of probabilities may stay below 1.
        """
        drawn = tf.random.stateless_uniform(shape=[], seed=(0, step))
        bounds = converted(self._sampler.task_cumulative_distribution)(step)
        return tf.reduce_sum(tf.cast(drawn >= bounds[:-1], tf.int64))
