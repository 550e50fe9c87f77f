"""MultiTaskBaseTrainer: trains all tasks in every step; it has the signature of official.modeling.multitask's."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from trainer_kit.compat.model_garden.config.conversion import Sections, convert
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask, build_parts
from trainer_kit.compat.model_garden.multitask.task_metrics import TaskMetrics
from trainer_kit.compat.model_garden.training.trainer import Trainer
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.loops.iterators import Iterators
from trainer_kit.training.multitask.trainer import MultiTaskTrainer


class MultiTaskBaseTrainer(Trainer, MultiTaskTrainer):
    """Trains several Model Garden tasks in each step, by `joint_train_step`. Created in strategy scope.

    It also evaluates the tasks that are passed to `evaluate_tasks`.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      trainer_options: Options of orbit.StandardTrainer; None: those in `config`.
      train_datasets: Datasets of all tasks that replace the tasks' own; distributed ones if there are replicas.
      config: The experiment's config, Model Garden's or trainer_kit's; None: all defaults.
    """

    def __init__(
        self,
        multi_task: Any,
        multi_task_model: Any,
        optimizer: Any,
        trainer_options: Any = None,
        train_datasets: Mapping[str, Any] | None = None,
        *,
        config: Any = None,
    ) -> None:
        task = self._engine_task(multi_task)
        build_parts(task.tasks, multi_task_model, train=True)
        sections, given = sections_of(config, task.tasks, trainer_options), _zipped(train_datasets, task.tasks)
        super().__init__(sections, task, multi_task_model, optimizer, evaluate=False, train_dataset=given)

    @property
    def multi_task(self) -> Any:
        """The MultiTask of Model Garden."""
        return self.task.multi_task

    @property
    def multi_task_model(self) -> Any:
        """The model of all tasks."""
        return self.model

    @property
    def training_losses(self) -> dict[str, Any]:
        """The metrics of the training losses by task, and of their sum as `total_loss`."""
        return dict(self._train_set.losses)

    @property
    def training_metrics(self) -> dict[str, list[Any]]:
        """The training metrics by task, without the losses."""
        return dict(self.train_metrics)

    def _engine_task(self, multi_task: Any) -> EngineTask:
        return EngineTask(multi_task)

    def _build_parts(self, task: Any, model: Any, train: bool, evaluate: bool) -> None:
        """Does nothing: the parts are built before the trainer."""

    def _training_metrics(self, config: Any, task: Any, model: Any) -> TaskMetrics:
        return TaskMetrics(task)


class _Zipped:
    """Distributed datasets by task as one, whose elements hold a batch of each task."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._datasets = dict(datasets)

    def __iter__(self) -> Iterators:
        return Iterators({name: iter(one) for name, one in self._datasets.items()})


def _zipped(datasets: Mapping[str, Any] | None, tasks: Mapping[str, Any]) -> Any:
    """Returns ready-made datasets by task as one dataset; None if there are none."""
    if datasets is None:
        return None
    if missing := ", ".join(tasks.keys() - datasets.keys()):
        raise UsageError(f"train_datasets: there is no dataset for the task {missing}; give one for each task")
    if all(isinstance(one, tf.data.Dataset) for one in datasets.values()):
        return tf.data.Dataset.zip(dict(datasets))
    return _Zipped(datasets)


def sections_of(config: Any, tasks: Mapping[str, Any], trainer_options: Any = None) -> Sections:
    """Returns the config sections for a trainer of `tasks`; missing sections have the defaults.

    Args:
      config: The experiment's config, Model Garden's or trainer_kit's, or None.
      tasks: Model Garden's tasks by name.
      trainer_options: Options of orbit.StandardTrainer, or None.
    """
    config = convert(config) if config is not None else None
    trainer = config.trainer if config is not None else TrainerConfig()
    if trainer_options is not None:
        loop = trainer_options.use_tf_while_loop and trainer_options.use_tf_function
        trainer = trainer.replace(train_tf_function=trainer_options.use_tf_function, train_tf_while_loop=loop)
    data = {name: getattr(task.task_config, "train_data", None) for name, task in tasks.items()}
    runtime = config.runtime if config is not None else RuntimeConfig()
    return Sections(SimpleNamespace(train_data=data), trainer, runtime)
