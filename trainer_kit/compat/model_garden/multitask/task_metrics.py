"""The training metrics of several tasks, under Model Garden's names."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.compat.model_garden.multitask.engine_task import TOTAL, EngineTask
from trainer_kit.training.losses import LOSS
from trainer_kit.training.metrics import MetricSet, task_metrics
from trainer_kit.training.multitask.metrics import MultiTaskMetrics


class TaskMetrics(MultiTaskMetrics):
    """Metric sets by task, with a total loss where each step trains all tasks. Created in strategy scope.

    Args:
      task: The EngineTask; its `step_counters` count the steps of each task.
    """

    def __init__(self, task: EngineTask) -> None:
        super().__init__(
            {name: MetricSet(LOSS, task_metrics(one, True)) for name, one in task.tasks.items()}, count_steps=False
        )
        self._task = task

    @property
    def losses(self) -> dict[str, Any]:
        """The metrics of the losses by task, and of their sum as `total_loss` if there is one."""
        total = {TOTAL: self.loss} if self._task.is_joint else {}
        return total | {name: one.loss for name, one in self.sets.items()}

    @tf.autograph.experimental.do_not_convert
    def count_step(self, name: str) -> None:
        """Counts a step of the task `name`; runs in graph, in cross-replica context."""
        self._task.step_counters[name].assign_add(1)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns a dict from task name to results; called in cross-replica context."""
        found = super().results()
        own = {name: found.pop(name) for name in list(found) if name not in self.sets}
        return {TOTAL: own, **found} if self._task.is_joint else found
