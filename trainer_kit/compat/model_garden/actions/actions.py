"""Actions after training loops and evaluations, with the names and signatures of official.core.actions."""

from __future__ import annotations

import functools
from typing import Any

import orbit
import tensorflow as tf
from official.core.actions import PruningAction
from official.modeling.optimization import ExponentialMovingAverage

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.compat.model_garden.actions.averages import EMACheckpointing
from trainer_kit.compat.model_garden.actions.recovery import RecoveryAction, RecoveryCondition
from trainer_kit.compat.model_garden.config.build_errors import told
from trainer_kit.compat.model_garden.config.gin_names import configurable
from trainer_kit.config.schema.optimization import AVERAGE
from trainer_kit.training.trainer import Trainer

__all__ = [
    "EMACheckpointing",
    "RecoveryAction",
    "RecoveryCondition",
    "get_eval_actions",
    "get_train_actions",
]


@configurable("official.core.actions.get_eval_actions")
def get_eval_actions(params: Any, trainer: Any, model_dir: str) -> list[Any]:
    """Returns the actions that run after each evaluation: if weights are averaged, saving the averages.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      trainer: The trainer, trainer_kit's or Model Garden's.
      model_dir: The run's folder.
    """
    most = params.trainer.max_to_keep
    if hasattr(trainer, "averaged_weights"):  # it has to know when averages are in place: a save may come meanwhile
        if trainer._average is None:
            return []
        averaged = functools.partial(trainer.averaged_weights, AVERAGE)
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most, averaged=averaged)]
    if isinstance(trainer.optimizer, ExponentialMovingAverage):
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most)]
    return []


@configurable("official.core.actions.get_train_actions")
def get_train_actions(
    params: Any, trainer: Any, model_dir: str, checkpoint_manager: tf.train.CheckpointManager
) -> list[Any]:
    """Returns the actions that run after each training loop.

    A Trainer of trainer_kit needs only pruning: its run recovers from divergence, and saves when preempted, without
    actions. Any other trainer also gets the recovery and preemption actions that the config asks for.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      trainer: The trainer, trainer_kit's or Model Garden's.
      model_dir: The run's folder.
      checkpoint_manager: The run's checkpoint manager.
    """
    actions: list[Any] = []
    if getattr(params.task, "pruning", None):
        with told("task.pruning", params.task):  # its package may be missing
            actions.append(PruningAction(model_dir, trainer.model, trainer.optimizer))
    if isinstance(trainer, Trainer):
        return actions
    options = params.trainer
    if options.recovery_max_trials >= 0:
        bounds = options.loss_upper_bound, options.recovery_begin_steps, options.recovery_max_trials
        condition = RecoveryCondition(trainer.global_step, *bounds)
        actions.append(orbit.actions.ConditionalAction(condition, RecoveryAction(checkpoint_manager)))
    # A run of trainer_kit saves by itself when it is preempted, and TensorFlow's handler cannot use its manager.
    saves_itself = isinstance(checkpoint_manager, CheckpointManager)
    if options.preemption_on_demand_checkpoint and trainer.strategy.cluster_resolver and not saves_itself:
        resolver, step = trainer.strategy.cluster_resolver, trainer.global_step
        actions.append(
            orbit.actions.SaveCheckpointIfPreempted(resolver, checkpoint_manager, step, keep_running_after_save=True)
        )
    return actions
