"""Decides in which training steps the summaries of a task are written."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import tensorflow as tf

from trainer_kit.config.schema.durations import exact_steps


class SummaryTimer:
    """Chooses the last step of the first training loop that begins after a time; then the time counts again.

    Args:
      seconds: The seconds between summaries.
      clock: Returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._chosen_at = seconds, clock, clock()
        with tf.device("CPU:0"), tf.init_scope():
            self._step = tf.Variable(-1, trainable=False, dtype=tf.int64, name="summary_step")

    def choose(self, end: int) -> bool:
        """Chooses the step that leads to the global step `end` if the time is over, and tells whether it did.

        Runs eagerly.
        """
        now = self._clock()
        is_over = now - self._chosen_at >= self._seconds
        if is_over:
            self._chosen_at = now
            self._step.assign(end - 1)
        return is_over

    def is_chosen(self, step: tf.Variable) -> tf.Tensor:
        """Returns whether the step that begins at the global step `step` is the chosen one; runs in graph."""
        return tf.equal(step, self._step)


def summary_condition(
    interval: int | SummaryTimer | None, step: tf.Variable, end: int
) -> Callable[[], tf.Tensor] | bool:
    """Returns the condition of a training loop for tf.summary.record_if.

    Runs eagerly; the condition is called in graph.

    Args:
      interval: The steps between summaries, or a timer; None: no summaries.
      step: The global step, an int64 scalar.
      end: The global step at the end of the loop.
    """
    if not interval:
        return False
    if isinstance(interval, SummaryTimer):
        interval.choose(end)
        return functools.partial(interval.is_chosen, step)
    return functools.partial(_is_due, step, interval)


def _is_due(step: tf.Variable, interval: int) -> tf.Tensor:
    """Returns whether `step` is the first one at or after a multiple of the interval, a bool scalar; runs in graph."""
    exact = exact_steps(interval)
    steps = exact.numerator
    parts = exact.denominator
    if parts == 1:
        return tf.equal(step % steps, 0)
    return tf.less(step * parts % steps, parts)
