"""Users' own models for backward-compatible training, with steps and a compile of their own, in
both Kerases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.compat import keras as tk_keras

KERAS = {"keras": keras, "tf_keras": tf_keras}
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(48, 4).astype("float32")
Y = np.eye(5, dtype="float32")[RANDOM.randint(0, 5, 48)]


def compute_both_losses(y: Any, predictions: Any, y_old: Any, old_predictions: Any) -> Any:
    """Returns the classification loss plus the influence loss, which rows of zeros have no share
    in.
    """
    own = keras.losses.categorical_crossentropy(y, predictions)
    old = tf.reduce_sum(y_old, axis=1) * keras.losses.categorical_crossentropy(
        y_old, old_predictions
    )
    return tf.reduce_mean(own + old)


def build_own_model(library: Any) -> Any:
    """Returns a compiled model of a class whose steps take (x, y, y_old), and whose compile is its
    own.
    """

    class Compatible(library.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.old_fc = library.Sequential(
                [library.Input((3,)), library.layers.Dense(2, activation="softmax")]
            )
            self.old_fc.trainable = False

        def compile(self, optimizer: Any, loss: Any) -> None:
            super().compile(jit_compile=False)
            self.optimizer = optimizer
            self.loss_fn = loss
            self.loss_tracker = library.metrics.Mean(name="loss")
            self.old_accuracy = library.metrics.CategoricalAccuracy()

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_batch_loss(data, training=True)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": self.loss_tracker.result(), "old_head_acc": self.old_accuracy.result()}

        def test_step(self, data: Any) -> dict[str, Any]:
            self.compute_batch_loss(data, training=False)
            return {"loss": self.loss_tracker.result(), "old_head_acc": self.old_accuracy.result()}

        def compute_batch_loss(self, data: Any, training: bool) -> Any:
            x, y, y_old = data
            predictions, embedding = self(x, training=training)
            old_predictions = self.old_fc(embedding, training=False)
            loss = self.loss_fn(y, predictions, y_old, old_predictions)
            self.loss_tracker.update_state(loss)
            self.old_accuracy.update_state(y_old, old_predictions)
            return loss

    library.utils.set_random_seed(1)
    inputs = library.Input((4,))
    embedding = library.layers.Dense(3)(inputs)
    model = Compatible(
        inputs=inputs, outputs=[library.layers.Dense(5, activation="softmax")(embedding), embedding]
    )
    model.compile(library.optimizers.SGD(0.01), compute_both_losses)
    return model


def batches() -> tf.data.Dataset:
    """Returns a dataset of (x, y, y_old); the old classifier knows the first two classes."""
    return tf.data.Dataset.from_tensor_slices((X, Y, Y[:, :2])).batch(16)


@pytest.mark.parametrize("library", KERAS)
def test_an_own_model_has_the_numbers_of_keras(library: str, tmp_path: Path) -> None:
    options = {"epochs": 2, "validation_data": batches(), "verbose": 0}
    plain = build_own_model(KERAS[library])
    expected = plain.fit(batches(), **options).history

    model = build_own_model(KERAS[library])
    before = [weight.copy() for weight in model.old_fc.get_weights()]
    history = tk_keras.fit(model, batches(), **options, model_dir=str(tmp_path)).history

    assert history.keys() == {"loss", "old_head_acc", "val_loss", "val_old_head_acc"}
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_equal(model.old_fc.get_weights(), before)
