"""Whether TensorFlow's op determinism is enabled in this process."""

from __future__ import annotations

import tensorflow as tf


def is_op_determinism_enabled() -> bool:
    """Whether op determinism is enabled, by us or by the user. Any context on the host may call it, in graph too.

    TensorFlow has a public function that enables it and none that asks for it. With op determinism, an
    eager `tf.timestamp` raises FailedPreconditionError, so this function runs one, which takes 0.03 ms.
    """
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return True
    return False
