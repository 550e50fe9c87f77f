"""Two tiny tasks that share a layer, for tests."""

from __future__ import annotations

from typing import Any

import keras

import trainer_kit as tk
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.testing import CLASSES, FEATURES, TinyConfig, tiny_experiment


@tk.configclass
class TwoTasksConfig(tk.MultiTaskConfig):
    """Two tasks of the same class, with batches of different sizes."""


@register_task(TwoTasksConfig)
class TwoTasks(tk.MultiTask):
    """A shared layer, and one for each task."""

    def build_models(self) -> dict[str, keras.Model]:
        points = keras.Input((FEATURES,))
        features = keras.layers.Dense(8, "relu", name="shared")(points)
        return {
            name: keras.Model(
                points, keras.layers.Dense(CLASSES, name=f"{name}_logits")(features), name=name
            )
            for name in self.tasks
        }


def two_tasks(task: dict[str, Any] | None = None, **trainer: Any) -> tk.ExperimentConfig:
    """Returns an experiment with the tasks `large` and `small`, named after their batches."""
    small = TinyConfig().replace(train_data={"global_batch_size": 4, "seed": 9})
    routines = {
        "large": tk.TaskRoutine(task_config=TinyConfig(), task_weight=2.0),
        "small": tk.TaskRoutine(task_config=small),
    }
    base = tiny_experiment(**trainer)
    return tk.ExperimentConfig(
        task=TwoTasksConfig(task_routines=routines).replace(**(task or {})), trainer=base.trainer
    )
