"""The names of Keras 3 and tf_keras that are not public and that trainer_kit still needs. No other module may use one.

Each is wrapped in a function, whose docstring says why no public way exists and what happens in a release without the
name. tests/engine/distribution/test_keras_internals.py fails when a name is gone or has changed.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

_LOG = logging.getLogger(__name__)
_GENERATOR = "global_seed_generator"


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that serves keras.random functions without a seed; None if none was made yet.

    Keras does not expose it: `keras.utils.set_random_seed` only drops it. Without the name the answer is None.
    """
    try:
        from keras.src.backend.common import global_state

        return global_state.get_global_attribute(_GENERATOR)
    except (ImportError, AttributeError):
        return None


def set_global_seed_generator(generator: keras.random.SeedGenerator) -> None:
    """Makes keras.random functions without a seed draw from `generator`, in functions that are traced afterwards.

    `keras.utils.set_random_seed` would seed Python, NumPy and TensorFlow too, in the middle of their numbers. Without
    the name nothing is set, and a warning says so: the state of Keras' own generator is then in no checkpoint.
    """
    try:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(_GENERATOR, generator)
    except (ImportError, AttributeError) as error:
        _LOG.warning(
            "Keras %s does not take a global seed generator (%s): after a resume, keras.random functions without a "
            "seed draw other numbers; give them a keras.random.SeedGenerator",
            *(keras.version(), error),
        )


def learning_rate_of(optimizer: Any) -> Any:
    """Returns the variable or schedule of the learning rate of an optimizer of either Keras; None if it has no rate.

    The public property shows only the value of a schedule at the optimizer's own iterations. Without the name that
    value is returned, and the rate at another step is unknown; legacy optimizers of tf_keras show the schedule.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    return getattr(optimizer, "learning_rate", None) if rate is None else rate


def replace_learning_rate(optimizer: keras.Optimizer, rate: Any) -> bool:
    """Makes a schedule the rate of an optimizer; False, and nothing is done, where the name is gone.

    The public setter takes the variable of a constant rate out of the optimizer's variables, so out of checkpoints.
    """
    if getattr(optimizer, "_learning_rate", None) is None:
        return False
    optimizer._learning_rate = rate
    return True


def variable_index(optimizer: keras.Optimizer, variable: Any) -> int:
    """Returns the position of a variable among those that an optimizer was built with.

    Keras' guide for own optimizers calls this method in `update_step`, where `variable` is a replica's part of a
    variable and no public attribute tells which one it belongs to. Without the name a step ends with an AttributeError.
    """
    return int(optimizer._get_variable_index(variable))


def keras_decays(optimizer: keras.Optimizer, variable: Any) -> bool:
    """Whether Keras applies the `weight_decay` of an optimizer to a variable, as `exclude_from_weight_decay` has set.

    Keras has a public way to exclude variables and none to read which are. Without the name the answer is True.
    """
    decays = getattr(optimizer, "_use_weight_decay", None)
    return True if decays is None else bool(decays(variable))
