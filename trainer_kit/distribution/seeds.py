"""One seed for all random numbers of a run."""

from __future__ import annotations

import sys

import keras

from trainer_kit.errors import ConfigError, Mistake

SEEDS = 2**32  # NumPy takes no larger one


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras, tf_keras too if it is imported; eager, on the host.

    Called before the model is built, two runs of equal code draw equal initial weights, dropout masks and shuffles.
    It does not start TensorFlow's runtime, so devices can still be configured.

    Args:
      seed: 0 to 2**32 - 1.

    Raises:
      ConfigError: for another one.
    """
    if not 0 <= seed < SEEDS:
        raise ConfigError([Mistake("runtime.random_seed", f"{seed} is not a seed", f"use 0 to {SEEDS - 1}")])
    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        # Its layers then draw from generators, whose state is in checkpoints; else from ops that begin anew.
        keras_2.backend.experimental.enable_tf_random_generator()
        keras_2.utils.set_random_seed(seed)
    keras.utils.set_random_seed(seed)
