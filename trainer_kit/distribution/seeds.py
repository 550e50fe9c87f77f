"""One seed for all random numbers of a run."""

from __future__ import annotations

import functools
import random
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import ConfigError, Mistake
from trainer_kit.process.deferred_imports import when_imported

SEEDS = 2**32  # NumPy takes no larger one


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras, and tf_keras as soon as it is imported; runs eagerly, on the host.

    Called before the model is built, two runs of equal code draw equal initial weights, dropout masks and shuffles.
    It does not start TensorFlow's runtime, so devices can still be configured.

    Args:
      seed: 0 to 2**32 - 1.

    Raises:
      ConfigError: when the seed is outside of this range.
    """
    if not 0 <= seed < SEEDS:
        raise ConfigError([Mistake("runtime.random_seed", f"{seed} is not a seed", f"use 0 to {SEEDS - 1}")])
    when_imported("tf_keras", "seed", functools.partial(_seed_keras_2, seed))
    keras.utils.set_random_seed(seed)


def _seed_keras_2(seed: int, keras_2: ModuleType) -> None:
    """Does what its set_random_seed does, but for Python, NumPy and TensorFlow: numbers may be drawn already.

    In a graph, TensorFlow's seed is that of the graph only.
    """
    # Its layers then draw from generators, whose state is in checkpoints; else from ops that start again.
    keras_2.backend.experimental.enable_tf_random_generator()
    python, numpy = random.getstate(), np.random.get_state()
    with tf.Graph().as_default():
        keras_2.utils.set_random_seed(seed)
    random.setstate(python)
    np.random.set_state(numpy)
