"""Seeds of all random numbers of a run, and op determinism."""

from __future__ import annotations

import random
import sys

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import ConfigError, Mistake

# NumPy takes no larger seed.
SEED_LIMIT = 2**32


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, TensorFlow, Keras and an imported tf_keras; runs eagerly, on the host.

    Called before the model is built, two runs of equal code draw equal initial weights, dropout
    masks and shuffles. An installed tf_keras is imported with trainer_kit.training. TensorFlow's
    runtime is not started, so devices can still be configured.

    Args:
      seed: 0 to 2**32 - 1.

    Raises:
      ConfigError: when the seed is outside of this range.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ConfigError(
            [Mistake("runtime.random_seed", f"{seed} is not a seed", f"use 0 to {SEED_LIMIT - 1}")]
        )

    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        # Its layers then draw from generators, whose state is in checkpoints. Otherwise they would
        # draw from operations that start again.
        keras_2.backend.experimental.enable_tf_random_generator()

        # Python, NumPy and TensorFlow keep their states: numbers may be drawn already. In a graph,
        # TensorFlow's seed is that of the graph only.
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        with tf.Graph().as_default():
            keras_2.utils.set_random_seed(seed)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    keras.utils.set_random_seed(seed)


def is_op_determinism_enabled() -> bool:
    """Whether op determinism is enabled, by us or by the user.

    Any context on the host may call it, in graph too.

    TensorFlow has a public function that enables it and none that asks for it. With op determinism,
    an eager `tf.timestamp` raises FailedPreconditionError, so this function runs one, which takes
    0.03 ms.
    """
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return True
    return False
