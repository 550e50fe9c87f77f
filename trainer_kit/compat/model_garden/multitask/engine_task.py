"""EngineTask: presents several tasks that are trained together to the engine as one task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.config.build_errors import TaskSections, part_of, sections_of, told
from trainer_kit.compat.model_garden.multitask.drawn_tasks import DrawnTasks
from trainer_kit.compat.model_garden.training.model_building import build_model
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.sources.base import made_inputs
from trainer_kit.inputs.sources.several_tasks import interleaved_data, joint_data
from trainer_kit.training.multitask.model import model_of_task

TOTAL = "total_loss"


class EngineTask:
    """Presents a MultiTask of Model Garden to the engine as one task. Created in strategy scope.

    Args:
      multi_task: A MultiTask of Model Garden.
      model: The model of all tasks; None: `multi_task.build_multitask_model` builds it.
      checkpoint_exporter: An exporter of the best checkpoint that replaces the engine's own.

    Attributes:
      sampler: Draws the task of each step; None: each step trains all tasks.
      step_counters: The int64 scalar variables that count the steps of each task; empty if each step trains all tasks.
        The run finds the variables here and saves them.
    """

    loss = "loss"

    def __init__(self, multi_task: Any, model: Any = None, checkpoint_exporter: Any = None) -> None:
        self.multi_task, self.checkpoint_exporter = multi_task, checkpoint_exporter
        self.sampler: DrawnTasks | None = None
        self.step_counters: dict[str, Any] = {}
        self._model = model

    @property
    def task_config(self) -> TaskSections:
        """The sections of the tasks by their paths in the experiment's config."""
        return sections_of(self.tasks.values())

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks of Model Garden by name."""
        return dict(self.multi_task.tasks)

    @property
    def is_joint(self) -> bool:
        """Whether each step trains all tasks."""
        return self.sampler is None

    def build_model(self) -> Any:
        """Returns the model of all tasks; called in strategy scope.

        Raises:
          UsageError: when no model was given and the MultiTask cannot build one.
        """
        if self._model is not None:
            return self._model
        build = getattr(self.multi_task, "build_multitask_model", None)
        if build is None:
            kind = type(self.multi_task).__name__
            raise UsageError(
                f"there is no model for the tasks: {kind} has no method build_multitask_model(), which returns a "
                "MultiTaskBaseModel; define it in a subclass of MultiTask, registered for the class of its config by "
                "official.core.task_factory.register_task_cls, or call run_experiment(model=...)"
            )
        return build()

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns []: each task has its own metrics."""
        del training
        return []

    def build_inputs(self, params: Mapping[str, Any], input_context: Any = None) -> Any:
        """Returns the training data of all tasks as one stream; see trainer_kit.MultiTask.

        Args:
          params: A dict from task name to the section of its training data.
          input_context: The worker's place among the others.
        """
        parts = {}
        for name, task in self.tasks.items():
            with told(part_of(self.task_config, params[name]), self.task_config):
                parts[name] = made_inputs(task.build_inputs, params[name], input_context)
        if self.sampler is None:
            return joint_data(parts, input_context)
        return interleaved_data(parts, self.sampler, input_context)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> dict[str, Any]:
        """Trains all tasks by `joint_train_step`; runs in graph, on a replica.

        Returns:
          Logs: the weighted sum of the losses, and the loss of each task under its name.

        Raises:
          UsageError: for a loss with an unknown name.
        """
        losses = dict(
            converted(self.multi_task.joint_train_step)(
                inputs, multi_task_model=model, optimizer=optimizer, task_metrics=metrics
            )
        )
        total = losses.pop(TOTAL, None)
        for name in losses:
            if name not in self.tasks:
                raise UsageError(
                    f"the training step returned a loss named {name!r}; it may return the total loss and one for each "
                    f"task: {TOTAL}, {', '.join(self.tasks)}"
                )
        if total is None or type(self.multi_task).joint_train_step is MultiTask.joint_train_step:
            # In float64, so that the order of the sum does not matter.
            weights = {name: self.multi_task.task_weight(name) for name in losses}
            total = tf.add_n([tf.cast(loss, tf.float64) * weights[name] for name, loss in losses.items()])
        return {self.loss: total, **{name: {self.tasks[name].loss: loss} for name, loss in losses.items()}}

    def initialize(self, model: Any) -> None:
        """Calls the model's `initialize`, if it has one, to load initial weights."""
        initialize = getattr(model, "initialize", None)
        if initialize is not None:
            initialize()


def build_parts(tasks: dict[str, Any], model: Any, train: bool) -> None:
    """Creates the variables of the parts of `model` that have none yet; runs eagerly, in strategy scope.

    Args:
      tasks: Model Garden's tasks by name.
      model: The model of all tasks.
      train: Whether the spec of a batch comes from train_data, or else from validation_data.
    """
    parts, sections = getattr(model, "sub_tasks", None), sections_of(tasks.values())
    for name, task in tasks.items():
        if parts is None or name in parts:
            build_model(task, model_of_task(model, name), train, sections=sections)
