"""Loss objects of Keras have the mean over the examples of all replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit as tk
from tests.builders import seeded_trainer

X = np.random.RandomState(0).randn(32, 4).astype("float32")
Y = X.sum(1, keepdims=True)


@tk.configclass
class LossObjectConfig(tk.TaskConfig):
    """Which library's model has which loss."""

    loss: str = "build_losses"


@tk.register_task(LossObjectConfig)
class LossObjectTask(tk.Task):
    """Regression with a Loss object, or with a compiled model, and with a regularizer."""

    def build_model(self) -> Any:
        library = tf_keras if self.task_config.loss == "tf_keras" else keras
        regularizer = library.regularizers.L2(0.1)
        layer = library.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=regularizer)
        model = library.Sequential([library.Input((4,)), layer])
        if self.task_config.loss != "build_losses":
            model.compile(loss=library.losses.MeanSquaredError())

        return model

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return tk.ArraySource((X, Y), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        if self.task_config.loss != "build_losses":
            return 0.0
        return keras.losses.MeanSquaredError()(labels, model_outputs) + tf.add_n(
            aux_losses or [0.0]
        )


def _compute_by_hand() -> tuple[float, np.ndarray]:
    """Returns the loss and the kernel after three steps of SGD on all examples."""
    kernel = np.ones((4, 1))
    bias = 0.0
    for _ in range(3):
        error = X @ kernel + bias - Y
        gradient = 2 * X.T @ error / len(X) + 2 * 0.1 * kernel
        kernel = kernel - 0.1 * gradient
        bias -= 0.1 * 2 * error.mean()

    squares = (X @ kernel + bias - Y) ** 2
    return squares.mean() + 0.1 * (kernel**2).sum(), kernel


@pytest.mark.parametrize("loss", ["build_losses", "keras", "tf_keras"])
def test_a_loss_object_counts_once_on_two_replicas(loss: str) -> None:
    rate = {"type": "constant", "constant": {"learning_rate": 0.1}}
    config = tk.ExperimentConfig(
        task=LossObjectConfig(
            loss=loss,
            train_data=tk.DataConfig(is_training=True, global_batch_size=len(X)),
            validation_data=tk.DataConfig(
                is_training=False, drop_remainder=False, global_batch_size=8
            ),
        ),
        trainer=tk.TrainerConfig(
            optimizer_config={"optimizer": {"type": "sgd"}, "learning_rate": rate}
        ),
    )
    expected_loss, expected_kernel = _compute_by_hand()
    trainer = seeded_trainer(config, LossObjectTask, 2)

    trainer.train(tf.constant(3))
    logs = trainer.evaluate(tf.constant(-1))

    assert logs["validation_loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert trainer.model.layers[0].kernel.numpy() == pytest.approx(expected_kernel, rel=1e-5)
