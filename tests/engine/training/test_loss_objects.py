"""Loss objects of Keras count as much on two replicas as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit as tk

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


def train(loss: str, replicas: int, folder: Path) -> tuple[float, Any]:
    """Returns the validation loss and the kernel after three steps."""
    data = {"global_batch_size": 8, "shuffle_buffer_size": 0}
    rate = {"type": "constant", "constant": {"learning_rate": 0.1}}
    mirrored = {
        "virtual_cpus": 2,
        "distribution_strategy": "mirrored",
        "all_reduce_alg": "hierarchical_copy",
    }
    config = tk.ExperimentConfig(
        task=LossObjectConfig(
            loss=loss,
            train_data=tk.DataConfig(is_training=True, **data),
            validation_data=tk.DataConfig(is_training=False, drop_remainder=False, **data),
        ),
        trainer=tk.TrainerConfig(
            train_steps=3,
            validation_interval=3,
            optimizer_config={"optimizer": {"type": "sgd"}, "learning_rate": rate},
        ),
        runtime=mirrored if replicas == 2 else {},
    )
    model, logs = tk.launch(config, "train_and_eval", str(folder))
    return logs["validation_loss"], model.layers[0].kernel.numpy()


@pytest.mark.parametrize("loss", ["build_losses", "keras", "tf_keras"])
def test_a_loss_object_is_the_same_on_two_replicas(loss: str, tmp_path: Path) -> None:
    loss_of_one, kernel_of_one = train(loss, 1, tmp_path / "one")
    loss_of_two, kernel_of_two = train(loss, 2, tmp_path / "two")

    assert loss_of_two == pytest.approx(loss_of_one, rel=1e-5)
    assert kernel_of_two == pytest.approx(kernel_of_one, rel=1e-5)
