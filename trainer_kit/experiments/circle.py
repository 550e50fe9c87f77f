"""Is a point inside or outside of a circle? Everything about the experiment is in this file."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import trainer_kit as tk


@tk.configclass
class CircleConfig(tk.TaskConfig):
    """The settings of the task; `--params_override=task.width=64` changes one.

    Attributes:
      width: The size of the hidden layer.
    """

    width: int = 32


@tk.register_task(CircleConfig)
class CircleTask(tk.Task):
    """Tells points inside of a circle from those outside."""

    def build_model(self) -> keras.Model:
        """Returns a net with one hidden layer: points [batch, 2] to logits [batch, 1]."""
        hidden = keras.layers.Dense(self.task_config.width, "tanh")
        return keras.Sequential([keras.Input((2,)), hidden, keras.layers.Dense(1)])

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns 2,000 points and their labels. Yours may come from np.load or pandas."""
        points = np.random.default_rng(params.seed).normal(size=(2000, 2)).astype("float32")
        labels = (np.linalg.norm(points, axis=1) > 1.2).astype("float32")
        return tk.ArraySource((points, labels), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy of the batch."""
        return keras.losses.BinaryCrossentropy(from_logits=True)(labels[:, None], model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the share of points that are told right."""
        return [keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)]


@tk.register_experiment("circle")
def circle() -> tk.ExperimentConfig:
    """Is a point inside or outside of a circle?"""
    train = {"is_training": True, "seed": 1, "global_batch_size": 50}
    held_out = {"is_training": False, "seed": 2, "global_batch_size": 50}
    steps = {"train_steps": 600, "steps_per_loop": 100, "validation_interval": 200}
    adam = {"optimizer": "adam", "learning_rate": 0.01}
    trainer = {**steps, "optimizer_config": adam, "best_checkpoint_eval_metric": "accuracy"}
    data = {"train_data": train, "validation_data": held_out}
    return tk.ExperimentConfig(task=CircleConfig()).replace(task=data, trainer=trainer)
