"""What loops have on the host: variables by which other threads stop them, or see how far they are, and constants."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def stop_variable() -> tf.Variable:
    """Returns a flag, on the host and outside every strategy, that ends a running loop when it is set."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(False, trainable=False, name="stop")


def flags() -> tuple[tf.Tensor, tf.Tensor]:
    """Returns False and True, on the host: to make one for each call of a loop takes as long as a small step."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.constant(False), tf.constant(True)


def as_int32(number: Any) -> tf.Tensor:
    """Returns a number as an int32 scalar, and the tensor itself if it is one; converting that takes 50 us."""
    if isinstance(number, tf.Tensor) and number.dtype == tf.int32:
        return number
    return tf.cast(number, tf.int32)


def batch_counter() -> tf.Variable:
    """Returns a counter, on the host, that tells another thread how far a loop is."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")
