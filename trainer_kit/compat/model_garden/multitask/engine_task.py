"""EngineTask: presents several tasks that are trained together to the engine as one task."""

from __future__ import annotations

from typing import Any

from trainer_kit.compat.model_garden.config.build_errors import TaskSections, sections_of
from trainer_kit.compat.model_garden.training.model_building import build_model
from trainer_kit.errors import UsageError


class EngineTask:
    """Presents a MultiTask of Model Garden to the engine as one task. Created in strategy scope.

    Args:
      multi_task: A MultiTask of Model Garden.
      model: The model of all tasks; None: `multi_task.build_multitask_model` builds it.
      checkpoint_exporter: An exporter of the best checkpoint that replaces the engine's own.

    Attributes:
      step_counters: Task -> int64 scalar variable that counts the task's steps; empty if each step trains all tasks.
        The run finds the variables here and saves them.
    """

    loss = "loss"

    def __init__(self, multi_task: Any, model: Any = None, checkpoint_exporter: Any = None) -> None:
        self.multi_task, self.checkpoint_exporter = multi_task, checkpoint_exporter
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

    def build_model(self) -> Any:
        """Returns the model of all tasks; in strategy scope.

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

    def initialize(self, model: Any) -> None:
        """Calls the model's `initialize`, if it has one, to load initial weights."""
        initialize = getattr(model, "initialize", None)
        if initialize is not None:
            initialize()


def part_for(model: Any, name: str) -> Any:
    """Returns the part of a MultiTaskBaseModel for the task `name`; any other model is returned whole.

    Raises:
      UsageError: when the model has no part for the task.
    """
    parts = getattr(model, "sub_tasks", None)
    if parts is None:
        return model
    if name not in parts:
        raise UsageError(f"{type(model).__name__} has no part for the task {name!r}; it has: {', '.join(parts)}")
    return parts[name]


def build_parts(tasks: dict[str, Any], model: Any, train: bool) -> None:
    """Creates the variables of the parts of `model` that have none yet; eager, in strategy scope.

    Args:
      tasks: Model Garden's tasks by name.
      model: The model of all tasks.
      train: Whether the spec of a batch comes from train_data, or else from validation_data.
    """
    parts, sections = getattr(model, "sub_tasks", None), sections_of(tasks.values())
    for name, task in tasks.items():
        if parts is None or name in parts:
            build_model(task, part_for(model, name), train, sections=sections)
