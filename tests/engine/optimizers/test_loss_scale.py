"""Loss scaling: skipped steps, changes of the scale, clipping of unscaled gradients, replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import on_each_replica, optimization, replicas
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients, scale_loss
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer


class Trial:
    """A weight vector, trained by gradients of one entry for each replica, before scaling."""

    def __init__(self, strategy: Any, make_optimizer: Callable[[], Any]) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = keras.Variable([1.0, 1.0], name="weights")
            self.optimizer = make_optimizer()
            self.optimizer.build([self.weights])
        self.step = tf.function(self._step, input_signature=[tf.TensorSpec((None, 2))])

    def _step(self, gradients: tf.Tensor) -> None:
        def replica_step() -> None:
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.gather(gradients, index)
            with tf.GradientTape() as tape:
                loss = scale_loss(self.optimizer, tf.reduce_sum(self.weights.value * gradient))
            apply_gradients(
                self.optimizer, [(tape.gradient(loss, self.weights.value), self.weights)]
            )

        self.strategy.run(replica_step)

    @property
    def scale(self) -> float:
        """The loss scale now."""
        return float(self.optimizer.dynamic_scale.numpy())


def repeat_row(row: list[float], count: int) -> np.ndarray:
    """Returns the gradient that sums to `row` over the replicas."""
    return np.array([row] * count, np.float32) / count


def test_a_finite_step_is_that_of_the_optimizer_alone() -> None:
    count = 2
    config = optimization("adam", global_clipnorm=0.5, epsilon=0.1)
    plain = Trial(replicas(count), lambda: create_optimizer(config))
    scaled = Trial(
        replicas(count), lambda: create_optimizer(config, mixed_precision_dtype="float16")
    )

    for row in ([3.0, 4.0], [-1.0, 0.25], [0.0, 0.1]):
        plain.step(repeat_row(row, count))
        scaled.step(repeat_row(row, count))

    for copy in on_each_replica(scaled.strategy, scaled.weights):
        np.testing.assert_allclose(copy, plain.weights.numpy(), rtol=1e-6)

    assert int(scaled.optimizer.iterations.numpy()) == 3
    assert scaled.scale == 2.0**15


@pytest.mark.parametrize(("count", "bad"), [(1, np.inf), (1, -np.inf), (2, np.nan)])
def test_an_infinite_gradient_skips_the_step_on_all_replicas(count: int, bad: float) -> None:
    config = optimization("sgd", momentum=0.9, clipvalue=1.0)
    trial = Trial(
        replicas(count), lambda: create_optimizer(config, mixed_precision_dtype="float16")
    )
    trial.step(repeat_row([0.5, 0.5], count))
    slots = [variable.numpy() for variable in trial.optimizer.inner_optimizer.variables]
    before = on_each_replica(trial.strategy, trial.weights)
    gradients = repeat_row([0.5, 0.5], count)
    gradients[-1, 1] = bad

    trial.step(gradients)

    np.testing.assert_array_equal(on_each_replica(trial.strategy, trial.weights), before)

    for slot, wanted in zip(trial.optimizer.inner_optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(slot.numpy(), wanted)

    assert int(trial.optimizer.iterations.numpy()) == 1
    assert trial.scale == 2.0**14

    trial.step(repeat_row([0.5, 0.5], count))

    assert int(trial.optimizer.iterations.numpy()) == 2
    assert np.all(np.array(on_each_replica(trial.strategy, trial.weights)) < before)


def test_a_fixed_scale_stays_and_still_skips() -> None:
    config = optimization("sgd")
    trial = Trial(
        replicas(1),
        lambda: create_optimizer(config, mixed_precision_dtype="float16", loss_scale=64.0),
    )

    for row in ([1.0, 1.0], [np.inf, 1.0]):
        trial.step(repeat_row(row, 1))

    assert trial.scale == 64.0
    np.testing.assert_allclose(trial.weights.numpy(), [0.9, 0.9], rtol=1e-6)


def test_the_scale_doubles_after_enough_good_steps_in_a_row() -> None:
    sgd = keras.optimizers.SGD
    trial = Trial(replicas(2), lambda: LossScaleOptimizer(sgd(0.1), 8.0, dynamic_growth_steps=2))
    scales = []

    for bad in (False, False, False, True, False, False):
        trial.step(repeat_row([np.nan if bad else 1.0, 1.0], 2))
        scales.append(trial.scale)

    assert scales == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def test_the_scale_never_falls_below_one() -> None:
    trial = Trial(replicas(1), lambda: LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0))

    for _ in range(3):
        trial.step(repeat_row([np.inf, 1.0], 1))

    assert trial.scale == 1.0


def test_a_half_precision_loss_is_scaled_in_float32() -> None:
    scaled = scale_loss(LossScaleOptimizer(keras.optimizers.SGD(0.1)), tf.constant(8.0, tf.float16))

    assert scaled.dtype == tf.float32
    assert float(scaled) == 8.0 * 2**15


def test_a_loss_scaled_before_the_build_follows_the_scale() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    scaled = tf.function(lambda: scale_loss(optimizer, tf.constant(1.0)))

    assert float(scaled()) == 2.0**15

    optimizer.dynamic_scale.assign(4.0)

    assert float(scaled()) == 4.0


def test_an_optimizer_refuses_a_gradient_too_few() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    optimizer.build(variables)

    with pytest.raises(ValueError, match="longer"):
        optimizer.apply([tf.constant(1.0)], variables)


def test_keras_fit_trains_with_it() -> None:
    dense = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((2,)), dense])
    optimizer = create_optimizer(optimization("sgd", 0.2), mixed_precision_dtype="float16")
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    losses = model.fit(x, x[:, :1] * 2, epochs=15, shuffle=False, verbose=0).history["loss"]

    assert losses[-1] < losses[0] / 4


def test_variables_have_paths_of_their_own() -> None:
    trial = Trial(
        replicas(1), lambda: create_optimizer(optimization("adam"), mixed_precision_dtype="float16")
    )
    paths = [variable.path for variable in trial.optimizer.variables]

    assert len(paths) == len(set(paths))
    assert {"LossScale/dynamic_scale", "LossScale/step_counter", "Adam/weights_momentum"} <= set(
        paths
    )
