"""Programs of tf_keras, which is Keras 2: functions that return a compiled model, and data."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tests.engine.compat.keras.keras_programs import Batches


def tf_keras_linear() -> Any:
    """Returns a model of tf_keras, whose seeds are its own."""
    tf_keras.utils.set_random_seed(3)
    model = tf_keras.Sequential([tf_keras.Input((8,)), tf_keras.layers.Dense(3)])
    model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Doubled(tf_keras.layers.Layer):
    """A layer with a condition of tensors: it doubles a batch with a positive sum."""

    def call(self, inputs: Any) -> Any:
        outputs = inputs
        if tf.reduce_sum(inputs) > 0:
            outputs = inputs * 2.0
        return outputs


class PositiveBatches(tf_keras.metrics.Metric):
    """A metric with conditions of tensors: the number of batches with a positive sum, negative from
    the third one.
    """

    def __init__(self) -> None:
        super().__init__(name="positive_batches")
        self.number = self.add_weight("number", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        if tf.reduce_sum(y_pred) > 0:
            self.number.assign_add(1.0)

    def result(self) -> Any:
        value = self.number + 0.0
        if value > 2:
            value = -value
        return value


def limited_squares(y_true: Any, y_pred: Any) -> Any:
    """Returns the squared error, halved if its mean is above 1, which is a condition of tensors."""
    error = tf.reduce_mean(tf.square(tf.cast(y_true, tf.float32)[:, None] - y_pred), -1)
    if tf.reduce_mean(error) > 1:
        error *= 0.5
    return error


def model_with_tensor_conditions() -> Any:
    """Returns a model of tf_keras with conditions of tensors in a layer, in its loss and in its
    metrics.
    """
    hidden = [Doubled(), tf_keras.layers.BatchNormalization()]
    model = tf_keras.Sequential([tf_keras.Input((8,)), *hidden, tf_keras.layers.Dense(3)])
    model.compile("sgd", limited_squares, metrics=[PositiveBatches(), limited_squares])
    return model


class TwoOptimizers(tf_keras.Model):
    """A model of tf_keras whose step trains its two layers with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tf_keras.layers.Dense(4)
        self.second = tf_keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))

    def compile(self, first_optimizer: Any, second_optimizer: Any) -> None:
        super().compile()
        self.first_optimizer = first_optimizer
        self.second_optimizer = second_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self(data) ** 2)
        for optimizer, layer in (
            (self.first_optimizer, self.first),
            (self.second_optimizer, self.second),
        ):
            variables = layer.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"square": loss}


def model_with_two_optimizers() -> Any:
    """Returns a model of tf_keras that is not built, with an optimizer of today and an old one."""
    model = TwoOptimizers()
    model.compile(tf_keras.optimizers.Adam(), tf_keras.optimizers.legacy.Adam(0.01))
    return model


class OldBatches(tf_keras.utils.Sequence):
    """The same as a Sequence of tf_keras."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        return Batches()[number]
