"""Variables on the host by which other threads stop a running loop, or see how far it is."""

from __future__ import annotations

import tensorflow as tf


def stop_variable() -> tf.Variable:
    """Returns a flag, on the host and outside every strategy, that ends a running loop when it is set."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(False, trainable=False, name="stop")


def batch_counter() -> tf.Variable:
    """Returns a counter, on the host, that tells another thread how far a loop is."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")
