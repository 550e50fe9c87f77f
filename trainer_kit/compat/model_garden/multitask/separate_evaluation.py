"""Support for experiments that train one task and evaluate others on its model."""

from __future__ import annotations

from typing import Any

from official.core import task_factory
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.actions.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.config.build_errors import TaskSections, told
from trainer_kit.compat.model_garden.config.config_classes import original
from trainer_kit.compat.model_garden.multitask.creation import MultiTaskTrainers
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask
from trainer_kit.compat.model_garden.multitask.evaluation import check_ours, evaluate_tasks
from trainer_kit.compat.model_garden.training.adopted_trainer import adopted
from trainer_kit.compat.model_garden.training.trainer import create_trainer
from trainer_kit.config.schema.experiment import ExperimentConfig


class SeparateEvaluation:
    """The task of such a run: a task that is trained, and the tasks that are evaluated.

    Args:
      train_task: The Model Garden task that is trained.
      eval_tasks: The Model Garden tasks that are evaluated.
      checkpoint_exporter: An exporter of the best checkpoint that replaces the engine's own.
    """

    def __init__(self, train_task: Any, eval_tasks: list[Any], checkpoint_exporter: Any = None) -> None:
        self.train_task, self.eval_tasks = train_task, eval_tasks
        self.checkpoint_exporter = checkpoint_exporter

    def begin(self, trainer: Any, config: ExperimentConfig, checkpoint_exporter: Any) -> None:
        """Makes `trainer` evaluate the tasks, each for the number of batches in the config's eval_tasks.

        Runs eagerly.
        """
        steps: dict[str, int | None] = {}
        for routine in original(config).eval_tasks:
            steps.update(dict.fromkeys((routine.task_config.name, routine.task_name), routine.eval_steps))
        check_ours(trainer)
        evaluate_tasks(trainer, self.eval_tasks, steps, checkpoint_exporter)


class SeparateTrainers:
    """Creates trainers for experiments with separate evaluation tasks, for the runner and the command line."""

    best_checkpoint = BestCheckpointExporter

    @classmethod
    def create(
        cls, config: ExperimentConfig, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer that trains one task and evaluates the others; called in strategy scope.

        Args:
          config: The experiment's config.
          task: A SeparateEvaluation, or only the task to train; the others are then created from the config.
          train: Whether the trainer will train.
          evaluate: Whether the trainer will evaluate.
          checkpoint_exporter: An exporter of the best checkpoint.
        """
        if not isinstance(task, SeparateEvaluation):
            task = SeparateEvaluation(task, _eval_tasks(config, task))
        if isinstance(task.train_task, MultiTask):
            engine_task = EngineTask(task.train_task)
            trainer = MultiTaskTrainers.create(config, engine_task, train, False)
        else:
            trainer = adopted(create_trainer(config, task.train_task, train, False), config.runtime.random_seed)
        if evaluate:
            task.begin(trainer, config, task.checkpoint_exporter or checkpoint_exporter)
        return trainer


def _eval_tasks(config: ExperimentConfig, train_task: Any) -> list[Any]:
    routines = original(config).eval_tasks
    names = [routine.task_name or routine.task_config.name for routine in routines]
    made = []
    for number, (routine, name) in enumerate(zip(routines, names, strict=True)):
        section = routine.task_config
        with told("task", TaskSections({f"eval_tasks.{number}.task_config": section})):
            made.append(task_factory.get_task(section, logging_dir=train_task.logging_dir, name=name))
    return made
