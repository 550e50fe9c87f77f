"""One seed, equal runs."""

from __future__ import annotations

import hashlib
import random
from types import ModuleType

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.errors import UsageError
from trainer_kit.runtime.determinism import seed_everything


def run(library: ModuleType, seed: int) -> str:
    """Returns a checksum of the weights of a model with dropout, trained on shuffled data."""
    seed_everything(seed)
    layers = library.layers
    model = library.Sequential(
        [layers.Dense(8, activation="relu"), layers.Dropout(0.5), layers.Dense(1)]
    )
    optimizer = library.optimizers.SGD(0.01)
    features = np.random.normal(size=[40, 4]).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(features).shuffle(40).batch(4)
    model.build([None, 4])

    @tf.function
    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            noise = tf.random.normal(tf.shape(batch), stddev=0.1)
            loss = tf.reduce_mean(tf.square(model(batch + noise, training=True) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for batch in dataset:
        step(batch)

    return hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_two_runs_with_one_seed_have_equal_weights(library: ModuleType) -> None:
    first = run(library, 7)
    second = run(library, 7)
    other = run(library, 8)

    assert first == second
    assert first != other


def test_python_numpy_and_tensorflow_are_seeded() -> None:
    def draw() -> tuple[float, float, float, float]:
        seed_everything(3)
        normal = keras.ops.convert_to_numpy(keras.random.normal([])).item()
        return (
            random.random(),
            float(np.random.rand()),
            float(tf.random.uniform([]).numpy()),
            normal,
        )

    assert draw() == draw()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_refuses_is_a_usage_error(seed: int) -> None:
    with pytest.raises(UsageError):
        seed_everything(seed)
