"""Host variables and constants of loops: flags that stop a loop from another thread, counters and constants."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf


def stop_variable() -> tf.Variable:
    """Returns a flag that ends a running loop when it is set: one variable on the host, also in a strategy's scope.

    A strategy would keep it on its GPUs, and each step would wait for a copy of it. The scope of a strategy holds for
    its thread only.
    """
    with ThreadPoolExecutor(1) as outside_of_the_scope:
        return outside_of_the_scope.submit(_stop_variable).result()


def _stop_variable() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(False, trainable=False, name="stop")


def should_continue(stop: tf.Variable, *conditions: tf.Tensor) -> tf.Tensor:
    """Returns whether a loop takes another step: all conditions hold, and no stop is requested.

    Runs in graph, on the host.

    Without a device TensorFlow would compute this on a GPU. Each step would then wait until the GPU has done the steps
    before it and the answer has come back.

    Args:
      stop: The flag of stop_variable.
      *conditions: Boolean scalars.
    """
    with tf.device("CPU:0"):
        result = tf.logical_not(stop)
        for condition in conditions:
            result = tf.logical_and(condition, result)
        return result


def flags() -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the tensors False and True, on the host: creating one per loop call takes as long as a small step."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(False), tf.constant(True)


def as_int32(number: Any) -> tf.Tensor:
    """Returns a number as an int32 scalar; a tensor of that dtype is returned unchanged, since a cast takes 50 us."""
    if isinstance(number, tf.Tensor) and number.dtype == tf.int32:
        return number
    return _constant(number) if type(number) is int else tf.cast(number, tf.int32)


@functools.lru_cache
def _constant(number: int) -> tf.Tensor:
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(number, tf.int32)


def batch_counter() -> tf.Variable:
    """Returns a counter, on the host, that shows another thread the progress of a loop."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")
