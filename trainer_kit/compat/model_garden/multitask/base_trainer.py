"""MultiTaskBaseTrainer: trains all tasks in every step; it has the signature of official.modeling.multitask's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.config.conversion import Sections, convert
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask, build_parts
from trainer_kit.compat.model_garden.multitask.task_data import TaskData
from trainer_kit.compat.model_garden.multitask.task_metrics import TOTAL, TaskMetrics
from trainer_kit.compat.model_garden.training.trainer import Trainer
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.inputs.autograph import converted


class MultiTaskBaseTrainer(Trainer):
    """Trains several Model Garden tasks in each step, by `joint_train_step`. Created in strategy scope.

    It also evaluates the tasks that are passed to `evaluate_tasks`.

    Args:
      multi_task: A MultiTask of Model Garden.
      multi_task_model: A MultiTaskBaseModel, or one model for all tasks.
      optimizer: An optimizer of tf_keras.
      trainer_options: Options of orbit.StandardTrainer; None: those in `config`.
      train_datasets: Datasets by task that replace the tasks' own; distributed ones if there are replicas.
      config: The experiment's config, Model Garden's or trainer_kit's; None: all defaults.
    """

    has_total_loss = True

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
        sections = sections_of(config, task.tasks, trainer_options)
        super().__init__(sections, task, multi_task_model, optimizer, evaluate=False, train_dataset=train_datasets)

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
        return dict(self._train_set.metrics)

    def problem_of_fusing(self) -> str:
        """Returns why several training steps cannot be compiled into one XLA program."""
        return "each task takes its batches from its own dataset, and batches of several datasets cannot be stacked"

    def _engine_task(self, multi_task: Any) -> EngineTask:
        return EngineTask(multi_task)

    def _training_metrics(self, config: Any, task: Any, model: Any) -> Any:
        return TaskMetrics(task.tasks, total=self.has_total_loss)

    def _open_data(self, given: Any) -> Any:
        parts = {}
        for name, task in self.task.tasks.items():
            params = functools.partial(getattr, task.task_config, "train_data")
            parts[name] = self.inputs.train_data_of(task, params, self._steps(name), (given or {}).get(name))
        return TaskData(parts, self._steps_of)

    def _steps(self, name: str) -> Any:
        """Returns the variable that counts a task's steps."""
        del name
        return self._global_step

    def _steps_of(self, step: int) -> dict[str, int]:
        """Returns task -> the task's own step number for a step of the run; both are counted from 1."""
        return dict.fromkeys(self.task.tasks, step)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(self, inputs: Any) -> None:
        def step(inputs: Any) -> Any:
            return converted(self.multi_task.joint_train_step)(
                inputs,
                multi_task_model=self.multi_task_model,
                optimizer=self.optimizer,
                task_metrics=self.training_metrics,
            )

        losses = self._compiled(step)(inputs)
        if type(self.multi_task).joint_train_step is MultiTask.joint_train_step:
            losses = {**losses, TOTAL: self._total(losses)}
        self._train_set.update_losses(losses)

    @tf.autograph.experimental.do_not_convert
    def _total(self, losses: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns the weighted sum of the losses, in float64 so that the order of summation does not matter."""
        weights = {name: self.multi_task.task_weight(name) for name in losses if name != TOTAL}
        return tf.add_n([tf.cast(losses[name], tf.float64) * weight for name, weight in weights.items()])

    def _compiled(self, step: Any) -> Any:
        """Returns `step`, compiled by XLA if the config asks for it."""
        return tf.function(step, jit_compile=True, autograph=False) if self.config.runtime.enable_xla else step


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
