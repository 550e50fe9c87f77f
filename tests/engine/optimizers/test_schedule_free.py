"""Schedule-free AdamW, where it differs from Keras' class. Its values are in test_factory.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.engine.optimizers import numpy_optimizers
from trainer_kit.optimizers.schedule_free import ScheduleFreeAdamW


def test_it_starts_at_weights_that_are_loaded_after_the_build() -> None:
    weights = keras.Variable([9.0, 9.0], name="weights")
    optimizer = ScheduleFreeAdamW(numpy_optimizers.RATE)
    optimizer.build([weights])
    start = np.array([1.0, -2.0])
    gradient = np.array([0.3, 0.1])
    weights.assign(start)

    for _ in range(3):
        optimizer.apply([tf.constant(gradient, tf.float32)], [weights])
    expected, _ = numpy_optimizers.schedule_free_adamw(start, [gradient] * 3)

    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)


def test_a_variable_without_a_gradient_at_first_starts_later() -> None:
    early = keras.Variable([1.0], name="early")
    late = keras.Variable([5.0], name="late")
    optimizer = ScheduleFreeAdamW(0.001)
    optimizer.build([early, late])
    for _ in range(3):
        optimizer.apply([tf.constant([1.0])], [early])

    optimizer.apply([tf.constant([1.0])], [late])

    np.testing.assert_allclose(late.numpy(), [5.0], atol=0.01)
