"""What the engine sees of several tasks that are trained together: one task."""

from __future__ import annotations

from typing import Any

from trainer_kit.compat.model_garden.config.build_errors import TaskSections, sections_of
from trainer_kit.compat.model_garden.training.model_building import build_model
from trainer_kit.errors import UsageError


class EngineTask:
    """One task for the engine, in place of a MultiTask of Model Garden. Made in strategy scope.

    Args:
      multi_task: of Model Garden.
      model: of all tasks; None: to be built by `multi_task.build_multitask_model`.
      checkpoint_exporter: keeps the best checkpoint, in place of the engine's own.

    Attributes:
      step_counters: int64 scalars, the steps that each task was trained; empty where each step trains all. They are
        found here, and saved with the run.
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
          UsageError: when there is none, and the MultiTask cannot build one.
        """
        if self._model is not None:
            return self._model
        build = getattr(self.multi_task, "build_multitask_model", None)
        if build is None:
            kind = type(self.multi_task).__name__
            raise UsageError(
                f"the model of several tasks is not known: {kind} has no build_multitask_model(), which returns a "
                "MultiTaskBaseModel; define it in a subclass of MultiTask, registered for the class of its config by "
                "official.core.task_factory.register_task_cls, or call run_experiment(model=...)"
            )
        return build()

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns none: each task has metrics of its own."""
        del training
        return []

    def initialize(self, model: Any) -> None:
        """Lets the model load its initial weights, if it has a way to."""
        initialize = getattr(model, "initialize", None)
        if initialize is not None:
            initialize()


def part_for(model: Any, name: str) -> Any:
    """Returns the part of `model` that is for the task `name`: of a MultiTaskBaseModel one, else all of it.

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
    """Makes the variables of the parts of `model` that have none yet; eager, in strategy scope.

    Args:
      tasks: of Model Garden, by name.
      model: of them all.
      train: whether their train_data tells what a batch looks like, or their validation_data.
    """
    parts, sections = getattr(model, "sub_tasks", None), sections_of(tasks.values())
    for name, task in tasks.items():
        if parts is None or name in parts:
            build_model(task, part_for(model, name), train, sections=sections)
