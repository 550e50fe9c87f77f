"""A task whose model is compiled: losses, metrics and example weights count once, in each loop."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import seeded_trainer

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(40, 4).astype("float32")
Y = RANDOM.randint(0, 2, (40, 1)).astype("float32")
WEIGHTS = RANDOM.rand(40).astype("float32")


@tk.configclass
class CompiledConfig(tk.TaskConfig):
    """Data with or without weights of examples."""

    weights: bool = False


@tk.register_task(CompiledConfig)
class CompiledTask(tk.Task):
    """Binary labels, in four batches."""

    def build_model(self) -> Any:
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
        )
        model.compile(
            loss="binary_crossentropy", metrics=[keras.metrics.TruePositives(name="hits")]
        )
        return model

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        arrays = (X, Y, WEIGHTS) if self.task_config.weights else (X, Y)
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(10)
        return dataset.repeat() if params.is_training else dataset


def train_and_evaluate_twice(*, weights: bool = False, **options: Any) -> list[dict[str, float]]:
    """Trains two loops with a rate of 0, evaluates after each, and returns the logs of all."""
    data = {"global_batch_size": 10, "drop_remainder": False}
    constant = {"type": "constant", "constant": {"learning_rate": 0.0}}
    config = tk.ExperimentConfig(
        task=CompiledConfig(
            weights=weights,
            train_data=tk.DataConfig(is_training=True, **data),
            validation_data=tk.DataConfig(is_training=False, **data),
        ),
        trainer=tk.TrainerConfig(
            steps_per_loop=4,
            optimizer_config={"optimizer": {"type": "sgd"}, "learning_rate": constant},
            **options,
        ),
    )
    trainer = seeded_trainer(config, CompiledTask)
    logs = []
    for _ in range(2):
        logs.append(trainer.train(tf.constant(4)))
        logs.append(trainer.evaluate(tf.constant(-1)))

    return logs


def compute_with_keras(**weights: Any) -> tuple[float, float]:
    """Returns the loss and the true positives of `Model.evaluate`."""
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")]
    )
    metrics = [keras.metrics.TruePositives(name="hits")]
    model.compile(loss="binary_crossentropy", metrics=metrics, run_eagerly=True)
    loss, hits = model.evaluate(X, Y, batch_size=10, verbose=0, **weights)
    return loss, hits


@pytest.mark.parametrize(
    ("fuse_steps", "weights"), [(1, None), (2, WEIGHTS)], ids=["", "fused, with weights"]
)
def test_each_loop_has_the_numbers_of_keras(fuse_steps: int, weights: Any) -> None:
    loss, hits = compute_with_keras(sample_weight=weights)

    all_logs = train_and_evaluate_twice(weights=weights is not None, fuse_steps=fuse_steps)

    assert [logs["hits"] for logs in all_logs] == [hits] * 4
    losses = [logs.get("training_loss", logs.get("validation_loss")) for logs in all_logs]
    assert losses == pytest.approx([loss] * 4)
