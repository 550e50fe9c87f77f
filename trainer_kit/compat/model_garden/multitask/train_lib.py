"""Runs experiments with several tasks, with the signatures of official.modeling.multitask.train_lib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import official.modeling.multitask.interleaving_trainer  # noqa: F401 - gin files may bind it
import tensorflow as tf
from official.core import task_factory
from official.modeling.multitask import task_sampler
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.adopted_trainer import adopted
from trainer_kit.compat.model_garden.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.build_errors import explain_config_errors, sections_of
from trainer_kit.compat.model_garden.config_classes import original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.gin_names import bindings_of
from trainer_kit.compat.model_garden.multitask.trainers import (
    EngineTask,
    MultiTaskBaseTrainer,
    MultiTaskEvaluator,
    MultiTaskInterleavingTrainer,
    check_trainer,
    evaluate_tasks,
)
from trainer_kit.compat.model_garden.optimizers import check_values, create_optimizer
from trainer_kit.compat.model_garden.runner import checked_config, exporter_of_run, with_options_of_eval
from trainer_kit.compat.model_garden.trainer import create_trainer, logging_folder
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.run import runner

TRAINERS: dict[str, Any] = {"interleaving": MultiTaskInterleavingTrainer, "joint": MultiTaskBaseTrainer}


class MultiTaskTrainers:
    """Creates trainers for experiments that train several tasks."""

    best_checkpoint = BestCheckpointExporter

    @classmethod
    def create(
        cls, config: ExperimentConfig, task: EngineTask, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer of the kind in trainer.trainer_type, or, if not `train`, an evaluator; called in scope."""
        check_values(task.multi_task, config)
        model = task.build_model()
        evaluation = (task.multi_task.task_eval_steps, checkpoint_exporter)
        if not train:
            options = {"config": config, "optimizer": create_optimizer(task.multi_task, config)}
            return MultiTaskEvaluator(task.tasks.values(), model, None, *evaluation, **options)
        trainer = _create_trainer(config, task.multi_task, model)
        if evaluate:
            evaluate_tasks(trainer, task.tasks.values(), *evaluation)
        return trainer


@dataclass(frozen=True)
class SeparateTasks:
    """The task of a run that trains one task and evaluates others on its model.

    Attributes:
      train_task: The Model Garden task that is trained, or a MultiTask.
      eval_tasks: The Model Garden tasks that are evaluated.
    """

    train_task: Any
    eval_tasks: list[Any]


class SeparateTrainers:
    """Creates trainers for experiments that train one task and evaluate others."""

    best_checkpoint = BestCheckpointExporter

    @classmethod
    def create(
        cls, config: ExperimentConfig, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None
    ) -> Any:
        """Returns a trainer that trains one task and evaluates the others; called in strategy scope.

        Args:
          config: The experiment's config.
          task: A SeparateTasks, or only the task to train; the others are then created from the config.
          train: Whether the trainer will train.
          evaluate: Whether the trainer will evaluate.
          checkpoint_exporter: An exporter of the best checkpoint.
        """
        if not isinstance(task, SeparateTasks):
            task = SeparateTasks(task, _create_eval_tasks(config, task))
        if isinstance(task.train_task, MultiTask):
            trainer = MultiTaskTrainers.create(config, EngineTask(task.train_task), train, False)
        else:
            trainer = adopted(create_trainer(config, task.train_task, train, False), config.runtime.random_seed)
        if evaluate:
            evaluate_tasks(trainer, task.eval_tasks, _eval_steps(config), checkpoint_exporter)
        return trainer


def _create_eval_tasks(config: ExperimentConfig, train_task: Any) -> list[Any]:
    tasks = []
    for number, routine in enumerate(original(config).eval_tasks):
        section = routine.task_config
        name = routine.task_name or section.name
        with explain_config_errors(f"eval_tasks.{number}.task_config"):
            tasks.append(task_factory.get_task(section, logging_dir=train_task.logging_dir, name=name))
    return tasks


def _eval_steps(config: ExperimentConfig) -> dict[str, int | None]:
    """Returns the batches per evaluation of each evaluated task, by both names that the task may have."""
    steps = {}
    for routine in original(config).eval_tasks:
        steps[routine.task_config.name] = routine.eval_steps
        steps[routine.task_name] = routine.eval_steps
    return steps


def _create_trainer(config: ExperimentConfig, multi_task: Any, model: Any) -> Any:
    options: Any = config.trainer
    kind = options.trainer_type
    if kind not in TRAINERS:
        raise UsageError(f"trainer.trainer_type: there is no trainer type {kind!r}; {suggestion(kind, list(TRAINERS))}")
    arguments: dict[str, Any] = {"config": config}
    if kind == "interleaving":
        sampling = original(options.task_sampler)
        arguments["task_sampler"] = task_sampler.get_task_sampler(sampling, multi_task.task_weights)
    optimizer = create_optimizer(multi_task, config)
    module = {"interleaving": "interleaving_trainer", "joint": "base_trainer"}[kind]
    theirs = f"official.modeling.multitask.{module}.{TRAINERS[kind].__name__}"
    bound = bindings_of(theirs, [*arguments, "multi_task", "multi_task_model", "optimizer"])
    return TRAINERS[kind](multi_task, model, optimizer, **arguments, **bound)


def create_task(config: Config, logging_dir: str | None = None) -> EngineTask:
    """Returns an EngineTask around the MultiTask of a section from `convert`; called in strategy scope.

    The MultiTask has the class that is registered with task_factory for the class of its config, if there is one.
    `logging_dir` exists during the call, because some tasks write to it when they are created.
    """
    theirs = original(config)
    registered = task_factory._REGISTERED_TASK_CLS.get(type(theirs), MultiTask)
    with logging_folder(logging_dir), explain_config_errors(" or ".join(sections_of(theirs.task_routines))):
        return EngineTask(registered.from_config(theirs, logging_dir=logging_dir))


def get_trainer(distribution_strategy: tf.distribute.Strategy, params: Any, task: Any, model: Any) -> Any:
    """Returns a trainer of several tasks, of the kind in trainer.trainer_type, with its optimizer.

    Args:
      distribution_strategy: The strategy in whose scope task and model were created.
      params: A MultiTaskExperimentConfig, converted or not.
      task: A MultiTask of Model Garden.
      model: A MultiTaskBaseModel, or one model for all tasks.

    Raises:
      UsageError: for an unknown trainer type.
    """
    with distribution_strategy.scope():
        return _create_trainer(convert(params), task, model)


def run_experiment(
    *,
    distribution_strategy: tf.distribute.Strategy,
    task: Any,
    model: Any,
    mode: str,
    params: Any,
    model_dir: str,
    run_post_eval: bool = False,
    trainer: Any = None,
    **options: Any,
) -> Any:
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
      The model; with run_post_eval: (model, the last evaluation's logs by task).

    Raises:
      UsageError, DataError, StorageError, DivergedError: as trainer_kit.run_experiment.
    """
    evaluated = (task.tasks.values(), task.task_eval_steps)
    engine_task = EngineTask(task, model)
    model, logs = _run(
        distribution_strategy, engine_task, evaluated, mode, convert(params), model_dir, run_post_eval, trainer, options
    )
    return (model, logs) if run_post_eval else model


def run_experiment_with_multitask_eval(
    *,
    distribution_strategy: tf.distribute.Strategy,
    train_task: Any,
    eval_tasks: list[Any],
    mode: str,
    params: Any,
    model_dir: str,
    run_post_eval: bool = False,
    trainer: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Trains one task and evaluates others on its model, in one mode of trainer_kit.run_experiment.

    Args:
      distribution_strategy: The strategy in whose scope the tasks were created.
      train_task: The Model Garden task to train; it builds the model.
      eval_tasks: The Model Garden tasks to evaluate, with distinct names.
      mode: The mode, such as train_and_eval.
      params: A MultiEvalExperimentConfig, converted or not.
      model_dir: The run's folder.
      run_post_eval: Whether to evaluate once more at the end.
      trainer: A Trainer of trainer_kit.compat.model_garden, created in strategy scope.
      **options: Further keyword arguments of trainer_kit.run_experiment.

    Returns:
      (model, the last evaluation's logs by task), or (model, {}) without run_post_eval.

    Raises:
      UsageError, DataError, StorageError, DivergedError: as trainer_kit.run_experiment.
    """
    config = convert(params)
    evaluated = (eval_tasks, _eval_steps(config))
    task = SeparateTasks(train_task, eval_tasks)
    trainer_to_use = trainer if lookup_mode(mode).trains else None
    model, logs = _run(
        distribution_strategy, task, evaluated, mode, config, model_dir, run_post_eval, trainer_to_use, options
    )
    return model, logs if run_post_eval else {}


def _run(
    strategy: tf.distribute.Strategy,
    task: EngineTask | SeparateTasks,
    evaluated: tuple[Iterable[Any], Mapping[str, int | None]],
    mode: str,
    config: ExperimentConfig,
    model_dir: str,
    run_post_eval: bool,
    trainer: Any,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs an experiment; a ready-made trainer will evaluate the tasks in `evaluated`, each for its steps."""
    checked_config(mode, config, model_dir, options)
    check_trainer(trainer)
    if trainer is not None and (lookup_mode(mode).evaluates or run_post_eval):
        evaluate_tasks(trainer, *evaluated, exporter_of_run(mode, config, model_dir, strategy, options))

    options = {"enable_async_checkpointing": False, "trainer": trainer, **options}
    options = with_options_of_eval(mode, config, model_dir, strategy, options)
    return runner.run_experiment(strategy, task, mode, config, model_dir, run_post_eval, **options)
