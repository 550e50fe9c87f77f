"""Runs experiments with several tasks, as official.modeling.multitask.train_lib does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from official.core import task_factory
from official.modeling.multitask import task_sampler
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden import experiment_runner as runner
from trainer_kit.compat.model_garden.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.garden_trainer import Trainer, ensure_logging_folder
from trainer_kit.compat.model_garden.multitask.trainers import (
    MultiTaskAdapter,
    MultiTaskBaseTrainer,
    MultiTaskEvaluator,
    MultiTaskInterleavingTrainer,
    set_evaluation_tasks,
)
from trainer_kit.compat.model_garden.optimizers import check_values, create_optimizer
from trainer_kit.compat.model_garden.trainer_adapter import adapt_trainer
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.typing import CheckpointExporter, Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_kit.compat.model_garden.garden_types import (
        AdaptableTrainer,
        ExperimentParams,
        GardenTask,
    )
    from trainer_kit.training.base_trainer import BaseTrainer

TRAINERS: dict[str, Callable[..., MultiTaskBaseTrainer]] = {
    "interleaving": MultiTaskInterleavingTrainer,
    "joint": MultiTaskBaseTrainer,
}


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run.

    Attributes:
      train_task: The task that is trained: a task of Model Garden, or a MultiTaskAdapter.
      eval_tasks: The Model Garden tasks that are evaluated on its model.
      eval_steps: The batches per evaluation of each evaluated task, by its name.
      trainer: A ready-made trainer of the trained task, or None.
    """

    train_task: GardenTask | MultiTaskAdapter
    eval_tasks: list[GardenTask]
    eval_steps: Mapping[str, int | None]
    trainer: AdaptableTrainer | None = None

    @property
    def build_inputs(self) -> Callable[..., Any]:
        """The method of the trained task, by which a run finds the length of an epoch."""
        return self.train_task.build_inputs


def create_run_tasks(
    config: ExperimentConfig,
    train_task: GardenTask | MultiTaskAdapter | MultiTask,
    eval_tasks: list[GardenTask] | None = None,
    trainer: AdaptableTrainer | None = None,
) -> RunTasks:
    """Returns the tasks of a run. Called in strategy scope.

    Args:
      config: The experiment's config. Without a section `eval_tasks`, the run evaluates what it
        trains.
      train_task: The task that is trained: a task or a MultiTask of Model Garden, or a
        MultiTaskAdapter.
      eval_tasks: The tasks to evaluate. None: those of the config are created.
      trainer: A ready-made trainer of the trained task, or None.
    """
    if isinstance(train_task, MultiTask):
        train_task = MultiTaskAdapter(train_task)
    if not hasattr(config, "eval_tasks"):
        eval_tasks = list(train_task.tasks.values())
        return RunTasks(train_task, eval_tasks, train_task.multi_task.task_eval_steps, trainer)

    # A task may have either name.
    routines = build_original(config).eval_tasks
    eval_steps = {}
    for routine in routines:
        eval_steps[routine.task_config.name] = routine.eval_steps
        eval_steps[routine.task_name] = routine.eval_steps

    if eval_tasks is None:
        eval_tasks = []
        logging_dir = getattr(train_task, "logging_dir", None)
        for number, routine in enumerate(routines):
            section = routine.task_config
            name = routine.task_name or section.name
            with explain_config_errors(f"eval_tasks.{number}.task_config"):
                task = task_factory.get_task(section, logging_dir=logging_dir, name=name)
                eval_tasks.append(task)
    return RunTasks(train_task, eval_tasks, eval_steps, trainer)


class MultiTaskTrainerFactory:
    """Creates trainers for experiments that train or evaluate several tasks."""

    best_checkpoint_class = BestCheckpointExporter

    @classmethod
    def create(
        cls,
        config: ExperimentConfig,
        task: RunTasks | GardenTask | MultiTaskAdapter,
        train: bool,
        evaluate: bool,
        checkpoint_exporter: CheckpointExporter | None = None,
    ) -> BaseTrainer:
        """Returns the trainer or the evaluator of a run.

        This is the ready-made trainer, one of the kind in trainer.trainer_type, one of one task, or
        an evaluator. Called in strategy scope.

        Args:
          config: The experiment's config.
          task: A RunTasks, or only the task to train. The others are then created from the config.
          train: Whether the trainer will train.
          evaluate: Whether the trainer will evaluate.
          checkpoint_exporter: An exporter of the best checkpoint.
        """
        tasks = task if isinstance(task, RunTasks) else create_run_tasks(config, task)
        train_task = tasks.train_task
        trainer: AdaptableTrainer
        if tasks.trainer is not None:
            trainer = tasks.trainer
        elif not isinstance(train_task, MultiTaskAdapter):
            trainer = Trainer.create(config, train_task, train, False)
        else:
            check_values(train_task.multi_task, config)
            model = train_task.build_model()
            if train:
                strategy = tf.distribute.get_strategy()
                trainer = get_trainer(strategy, config, train_task.multi_task, model)
            else:
                # If the optimizer averages the weights, the averages are evaluated.
                optimizer = create_optimizer(train_task.multi_task, config)
                trainer = MultiTaskEvaluator(
                    train_task.tasks.values(), model, config=config, optimizer=optimizer
                )

        if evaluate:
            set_evaluation_tasks(trainer, tasks.eval_tasks, tasks.eval_steps, checkpoint_exporter)
        adapted: BaseTrainer = adapt_trainer(trainer, config.runtime.random_seed)
        return adapted


def get_trainer(
    distribution_strategy: tf.distribute.Strategy,
    params: ExperimentParams,
    task: MultiTask,
    model: Model,
) -> MultiTaskBaseTrainer:
    """Returns a trainer of several tasks, of the kind in trainer.trainer_type, with its optimizer.

    Args:
      distribution_strategy: The strategy in whose scope task and model were created.
      params: A MultiTaskExperimentConfig, converted or not.
      task: A MultiTask of Model Garden.
      model: A MultiTaskBaseModel, or one model for all tasks.

    Raises:
      UsageError: For an unknown trainer type.
    """
    config = convert(params)
    section: Any = config.trainer
    trainer_type = section.trainer_type
    if trainer_type not in TRAINERS:
        raise UsageError(
            f"trainer.trainer_type: there is no trainer type {trainer_type!r};"
            f" {suggest_names(trainer_type, list(TRAINERS))}"
        )

    arguments: dict[str, Any] = {"config": config}
    if trainer_type == "interleaving":
        sampling = build_original(section.task_sampler)
        arguments["task_sampler"] = task_sampler.get_task_sampler(sampling, task.task_weights)
    with distribution_strategy.scope():
        optimizer = create_optimizer(task, config)
        return TRAINERS[trainer_type](task, model, optimizer, **arguments)


def create_task(config: Config, logging_dir: str | None = None) -> MultiTaskAdapter:
    """Returns a MultiTaskAdapter around the MultiTask of a section from `convert`.

    Called in strategy scope. The MultiTask has the class that is registered with task_factory for
    the class of its config, if there is one. `logging_dir` exists during the call, because some
    tasks write to it when they are created.
    """
    section = build_original(config)
    task_class = task_factory._REGISTERED_TASK_CLS.get(type(section), MultiTask)
    with ensure_logging_folder(logging_dir), explain_config_errors("task.task_routines"):
        return MultiTaskAdapter(task_class.from_config(section, logging_dir=logging_dir))


def run_experiment(
    *,
    distribution_strategy: tf.distribute.Strategy,
    task: MultiTask,
    model: Model,
    mode: str,
    params: ExperimentParams,
    model_dir: str,
    run_post_eval: bool = False,
    trainer: AdaptableTrainer | None = None,
    **options: Any,
) -> Model | tuple[Model, Mapping[str, Any]]:
    """Trains or evaluates several tasks in one mode of trainer_kit.run_experiment.

    Args:
      distribution_strategy: The strategy in whose scope task and model were created.
      task: A MultiTask of Model Garden.
      model: A MultiTaskBaseModel, or one model for all tasks.
      mode: The mode, such as train_and_eval.
      params: A MultiTaskExperimentConfig, converted or not.
      model_dir: The run's folder.
      run_post_eval: Whether to evaluate once more at the end.
      trainer: A trainer from `get_trainer`, or one created in strategy scope.
      **options: Further keyword arguments of trainer_kit.run_experiment.

    Returns:
      The model. With run_post_eval: (model, the last evaluation's logs by task).

    Raises:
      UsageError, DataError, StorageError, DivergedError: As trainer_kit.run_experiment.
    """
    config = convert(params)
    train_task = MultiTaskAdapter(task, model)
    tasks = create_run_tasks(config, train_task, trainer=trainer)
    model, logs = runner.run_experiment(
        distribution_strategy, tasks, mode, config, model_dir, run_post_eval, **options
    )
    if run_post_eval:
        return model, logs
    return model


def run_experiment_with_multitask_eval(
    *,
    distribution_strategy: tf.distribute.Strategy,
    train_task: GardenTask,
    eval_tasks: list[GardenTask],
    mode: str,
    params: ExperimentParams,
    model_dir: str,
    run_post_eval: bool = False,
    trainer: AdaptableTrainer | None = None,
    **options: Any,
) -> tuple[Model, Mapping[str, Any]]:
    """Trains one task and evaluates others on its model, in one mode of trainer_kit.run_experiment.

    Args:
      distribution_strategy: The strategy in whose scope the tasks were created.
      train_task: The Model Garden task to train. It builds the model.
      eval_tasks: The Model Garden tasks to evaluate, with distinct names.
      mode: The mode, such as train_and_eval.
      params: A MultiEvalExperimentConfig, converted or not.
      model_dir: The run's folder.
      run_post_eval: Whether to evaluate once more at the end.
      trainer: A Trainer of trainer_kit.compat.model_garden, created in strategy scope.
      **options: Further keyword arguments of trainer_kit.run_experiment.

    Returns:
      (model, logs): the last evaluation's logs by task with run_post_eval or in mode
      train_and_post_eval, else {}.

    Raises:
      UsageError, DataError, StorageError, DivergedError: As trainer_kit.run_experiment.
    """
    config = convert(params)
    # A run that only evaluates creates its own trainer.
    used_trainer = trainer if lookup_mode(mode).trains else None
    tasks = create_run_tasks(config, train_task, eval_tasks, used_trainer)
    return runner.run_experiment(
        distribution_strategy, tasks, mode, config, model_dir, run_post_eval, **options
    )
