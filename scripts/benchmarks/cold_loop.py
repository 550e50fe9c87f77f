"""The hand-written loop as a program, `python -m scripts.benchmarks.cold_loop`, to measure the time to its first step.

It trains on the same digits as experiments/digits_mlp does, with the same net and optimizer, one step in a loop, and
prints a line after each, as trainer_kit does.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def main(steps: int = 5) -> None:
    """Trains."""
    digits = load_digits()
    data = tf.data.Dataset.from_tensor_slices(((digits.data / 16).astype(np.float32), digits.target.astype(np.int32)))
    iterator = iter(data.shuffle(1797).repeat().batch(32, drop_remainder=True).prefetch(tf.data.AUTOTUNE))
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    accuracy, mean_loss = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    @tf.function
    def loop(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            features, labels = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, logits)
            mean_loss.update_state(loss)

    for number in range(steps):
        loop(iterator, tf.constant(1))
        print(
            f"train | step {number + 1} loss {float(mean_loss.result()):.4f} {float(accuracy.result()):.4f}", flush=True
        )


if __name__ == "__main__":
    main()
