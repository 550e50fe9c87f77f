"""MultiTaskInterleavingTrainer: trains one task in each step; its signature is official.modeling.multitask's."""

from __future__ import annotations

from typing import Any

import orbit

from trainer_kit.compat.model_garden.multitask.base_trainer import MultiTaskBaseTrainer
from trainer_kit.compat.model_garden.multitask.drawn_tasks import DrawnTasks
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask


class MultiTaskInterleavingTrainer(MultiTaskBaseTrainer):
    """Trains one of several Model Garden tasks in each step, by its `train_step`. Created in strategy scope.

    As in Model Garden, the task is a pure function of the step and the sampler, so a resumed run draws the same tasks.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      task_sampler: A task sampler of Model Garden.
      trainer_options: Options of orbit.StandardTrainer; None: those in `config`.
      config: The experiment's config, Model Garden's or trainer_kit's; None: all defaults.
    """

    def __init__(
        self,
        multi_task: Any,
        multi_task_model: Any,
        optimizer: Any,
        task_sampler: Any,
        trainer_options: Any = None,
        *,
        config: Any = None,
    ) -> None:
        self._task_sampler = task_sampler
        super().__init__(multi_task, multi_task_model, optimizer, trainer_options, config=config)

    def task_step_counter(self, name: str) -> Any:
        """Returns the int64 scalar variable that counts a task's steps; checkpoints hold it."""
        return self.task.step_counters[name]

    def _engine_task(self, multi_task: Any) -> EngineTask:
        task = super()._engine_task(multi_task)
        task.sampler = DrawnTasks(self._task_sampler, len(task.tasks))
        task.step_counters = {name: orbit.utils.create_global_step() for name in task.tasks}
        return task
