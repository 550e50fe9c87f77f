"""Restores the state of a process without models, for the next of several runs in one process."""

from __future__ import annotations

import sys

import keras

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.distribution.precision import set_precision
from trainer_kit.distribution.seeds import seed_everything


def forget_models(runtime: RuntimeConfig) -> None:
    """Frees the state that Keras keeps of earlier models, and seeds everything; runs eagerly, on the host.

    What is built next has the names, draws the random numbers and has the dtype policy that it would have in a new
    process, whatever was built before.
    """
    policy = keras.config.dtype_policy()  # the user's own, if the config has none
    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        keras_2.backend.clear_session()
    keras.utils.clear_session()
    keras.config.set_dtype_policy(policy)
    seed_everything(runtime.random_seed)
    set_precision(runtime)
