"""run_experiment for several tasks, with the signatures of official.modeling.multitask.train_lib."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from official.core import train_utils

from trainer_kit.callbacks.orbit_actions import Actions, keep_states
from trainer_kit.compat.model_garden.actions.best_checkpoint import maybe_create_best_ckpt_exporter
from trainer_kit.compat.model_garden.config.conversion import convert
from trainer_kit.compat.model_garden.multitask.creation import TRAINERS, create_trainer
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask
from trainer_kit.compat.model_garden.multitask.evaluation import check_ours, evaluate_tasks
from trainer_kit.compat.model_garden.multitask.separate_evaluation import SeparateEvaluation
from trainer_kit.compat.model_garden.training.runner import (
    checked_config,
    exporter_of_run,
    noticed,
    with_options_of_eval,
)
from trainer_kit.config.modes import lookup_mode
from trainer_kit.run import runner
from trainer_kit.run.controller import Controller

__all__ = ["TRAINERS", "get_trainer", "run_experiment", "run_experiment_with_multitask_eval"]


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
    eval_summary_manager: Any = None,
    best_ckpt_exporter_creator: Any | None = train_utils.maybe_create_best_ckpt_exporter,
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
      eval_summary_manager: A summary manager that replaces the one for the validation summaries.
      best_ckpt_exporter_creator: Called with params and model_dir; Model Garden's stands for trainer_kit's exporter.
      **options: Further keyword arguments of trainer_kit.run_experiment.

    Returns:
      The model; with run_post_eval: (model, the last evaluation's logs by task).

    Raises:
      UsageError, DataError, StorageError, DivergedError: as trainer_kit.run_experiment.
    """
    config = checked_config(mode, params, model_dir, options)
    exporter = _own_exporter(best_ckpt_exporter_creator, params, model_dir, distribution_strategy)
    engine_task = EngineTask(task, model, exporter)
    check_ours(trainer)
    if trainer is not None and (lookup_mode(mode).evaluates or run_post_eval):
        exporter = exporter or exporter_of_run(mode, config, model_dir, distribution_strategy, options)
        evaluate_tasks(trainer, task.tasks.values(), task.task_eval_steps, exporter)
    chosen = {"enable_async_checkpointing": False, "eval_summary_manager": eval_summary_manager, **options}
    model, logs = runner.run_experiment(
        distribution_strategy,
        engine_task,
        mode,
        config,
        model_dir,
        run_post_eval,
        trainer=trainer,
        **with_options_of_eval(mode, config, model_dir, distribution_strategy, chosen),
    )
    return (model, logs) if run_post_eval else model


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
        return create_trainer(convert(params), task, model)


def run_experiment_with_multitask_eval(
    *,
    distribution_strategy: tf.distribute.Strategy,
    train_task: Any,
    eval_tasks: list[Any],
    mode: str,
    params: Any,
    model_dir: str,
    run_post_eval: bool = False,
    save_summary: bool = True,
    trainer: Any | None = None,
    eval_summary_manager: Any = None,
    best_ckpt_exporter_creator: Any | None = train_utils.maybe_create_best_ckpt_exporter,
    train_actions_factory: Any | None = None,
    eval_actions_factory: Any | None = None,
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
      save_summary: Whether to write TensorBoard summaries.
      trainer: A Trainer of trainer_kit.compat.model_garden, created in strategy scope.
      eval_summary_manager: A summary manager that replaces the one for the validation summaries.
      best_ckpt_exporter_creator: Called with params and model_dir; Model Garden's stands for trainer_kit's exporter.
      train_actions_factory: Called with params, trainer, model_dir and checkpoint_manager, all by name.
      eval_actions_factory: Called with params, the evaluator and model_dir.
      **options: Further keyword arguments of trainer_kit.run_experiment.

    Returns:
      (model, the last evaluation's logs by task), or (model, {}) without run_post_eval.

    Raises:
      UsageError, DataError, StorageError, DivergedError: as trainer_kit.run_experiment.
    """
    config, evaluates = checked_config(mode, params, model_dir, options), lookup_mode(mode).evaluates or run_post_eval
    exporter = _own_exporter(best_ckpt_exporter_creator, params, model_dir, distribution_strategy)
    separate = SeparateEvaluation(train_task, eval_tasks, exporter)
    check_ours(trainer)
    if trainer is not None and evaluates and lookup_mode(mode).trains:
        exporter = exporter or exporter_of_run(mode, config, model_dir, distribution_strategy, options)
        separate.begin(trainer, config, exporter)

    add_actions = functools.partial(_add_actions, train_actions_factory, eval_actions_factory, params, model_dir)
    managers = {"save_summary": save_summary, "eval_summary_manager": eval_summary_manager}
    chosen = {"enable_async_checkpointing": False, **managers, **options}
    model, logs = runner.run_experiment(
        distribution_strategy,
        separate,
        mode,
        config,
        model_dir,
        run_post_eval,
        trainer=trainer if lookup_mode(mode).trains else None,
        controller_cls=noticed(Controller, add_actions),
        **with_options_of_eval(mode, config, model_dir, distribution_strategy, chosen),
    )
    return model, logs if run_post_eval else {}


def _add_actions(train_actions: Any, eval_actions: Any, params: Any, model_dir: str, controller: Controller) -> None:
    """Adds the actions of two factories, each of which may be None, to a new controller."""
    actions = next(one for one in controller.callbacks.members if isinstance(one, Actions))
    trainer, manager = controller.trainer, controller.checkpoint_manager
    if trainer is not None and train_actions is not None:
        made = train_actions(params=params, trainer=trainer, model_dir=model_dir, checkpoint_manager=manager)
        keep_states(trainer, made, "made action")
        actions.train_actions += made
    if controller.evaluator is not None and eval_actions is not None:
        actions.eval_actions += eval_actions(params, controller.evaluator, model_dir)


def _own_exporter(creator: Any, params: Any, model_dir: str, strategy: tf.distribute.Strategy) -> Any:
    """Returns the caller's exporter of the best checkpoint; None if the engine has to create one."""
    if creator in (None, train_utils.maybe_create_best_ckpt_exporter, maybe_create_best_ckpt_exporter):
        return None
    with strategy.scope():  # the exporter asks the current strategy whether this worker keeps files
        return creator(params, model_dir)
