"""ModelGardenInputs: opens the data of Model Garden's tasks for a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.compat.model_garden.config.build_errors import TaskSections, part_of, told
from trainer_kit.distribution.datasets import whole_steps
from trainer_kit.training.trainer_parts.task_inputs import TaskInputs


class ModelGardenInputs(TaskInputs):
    """Opens training and validation data by a task's build_inputs, and names the config section in error messages.

    Args:
      config, task, distribute: See TaskInputs.

    Attributes:
      sections: The config sections of Model Garden's tasks, by their paths.
    """

    def __init__(self, config: Any, task: Any, distribute: Callable[[Any], Any]) -> None:
        super().__init__(config, task, distribute)
        of_task = task.task_config
        self.sections = of_task if isinstance(of_task, TaskSections) else TaskSections({"task": of_task})

    def add_evaluated(self, tasks: list[Any]) -> None:
        """Adds the sections of tasks that are evaluated but not trained."""
        known = [id(one) for one in self.sections.values()]
        others = {f"eval_tasks.{n}.task_config": task.task_config for n, task in enumerate(tasks)}
        more = {path: section for path, section in others.items() if id(section) not in known}
        self.sections = TaskSections({**self.sections, **more})

    def open_validation(self, build_inputs: Any, params: Any, input_context: Any) -> tf.data.Dataset:
        """Returns one pass over a worker's validation data, with equally many steps on all workers; see TaskInputs."""
        return whole_steps(super().open_validation(build_inputs, params, input_context), input_context)

    def opened(self, params: Any, open_data: Callable[..., tf.data.Dataset], build_inputs: Any) -> Any:
        """Returns the data distributed over the replicas; runs eagerly."""
        with told(part_of(self.sections, params), self.sections):
            return super().opened(params, open_data, build_inputs)
