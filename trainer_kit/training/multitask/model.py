"""MultiTaskModel: the models of several tasks, which may share layers, as one Keras model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from trainer_kit.errors import UsageError

_ATTRIBUTE = "sub_task_"  # the beginning of the attribute that holds the model of a task


class MultiTaskModel(keras.Model):
    """The models of several tasks as one. Called on features, it returns the outputs of all of them.

    Args:
      sub_tasks: The Keras 3 model of each task, by the task's name; layers of several models are shared.

    """

    def __init__(self, sub_tasks: Mapping[str, keras.Model]) -> None:
        super().__init__(name="multi_task")
        self._names = tuple(sub_tasks)
        for name, model in sub_tasks.items():  # as attributes: tf.train.Checkpoint does not look into a dict
            setattr(self, f"{_ATTRIBUTE}{name}", model)
        self.built = True

    @property
    def sub_tasks(self) -> dict[str, keras.Model]:
        """The model of each task, by the task's name."""
        return {name: getattr(self, f"{_ATTRIBUTE}{name}") for name in self._names}

    def call(self, inputs: Any, training: bool | None = None) -> dict[str, Any]:
        """Returns {task: outputs} for features that all tasks take; runs in graph or eagerly, on a replica."""
        return {name: model(inputs, training=training) for name, model in self.sub_tasks.items()}


def model_of_task(model: Any, name: str) -> Any:
    """Returns the model of the task `name`: its entry in `model.sub_tasks`, or the model without them.

    Raises:
      UsageError: when the model has an attribute sub_tasks without this task.
    """
    models = getattr(model, "sub_tasks", None)
    if models is None:
        return model
    if name not in models:
        raise UsageError(
            f"{type(model).__name__} has no model for the task {name!r}; its attribute sub_tasks has: "
            f"{', '.join(models)}"
        )
    return models[name]
