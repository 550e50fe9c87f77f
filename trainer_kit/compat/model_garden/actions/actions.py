"""What happens after training loops and evaluations, by the names and signatures of official.core.actions."""

from __future__ import annotations

from typing import Any

import orbit
import tensorflow as tf
from official.core.actions import PruningAction
from official.modeling.optimization import ExponentialMovingAverage

from trainer_kit.compat.model_garden.actions.averages import EMACheckpointing
from trainer_kit.compat.model_garden.actions.recovery import RecoveryAction, RecoveryCondition
from trainer_kit.compat.model_garden.config.build_errors import told
from trainer_kit.compat.model_garden.config.gin_names import configurable
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
    """Returns what has to happen after each evaluation: where weights are averaged, saving the averages.

    Args:
      params: the experiment's config, of trainer_kit or of Model Garden.
      trainer: of trainer_kit or of Model Garden.
      model_dir: of the run.
    """
    most = params.trainer.max_to_keep
    if hasattr(trainer, "averaged_weights"):  # it has to know when they are in place, for a save that comes meanwhile
        if trainer._average is None:
            return []
        averaged = trainer.averaged_weights
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most, averaged=averaged)]
    if isinstance(trainer.optimizer, ExponentialMovingAverage):
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most)]
    return []


@configurable("official.core.actions.get_train_actions")
def get_train_actions(
    params: Any, trainer: Any, model_dir: str, checkpoint_manager: tf.train.CheckpointManager
) -> list[Any]:
    """Returns what has to happen after each training loop.

    For a Trainer of trainer_kit that is pruning: its run goes back after a divergence, and saves when it is preempted,
    by itself. Any other trainer also gets the actions for these two that the config asks for.

    Args:
      params: the experiment's config, of trainer_kit or of Model Garden.
      trainer: of trainer_kit or of Model Garden.
      model_dir: of the run.
      checkpoint_manager: of the run's checkpoints.
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
    if options.preemption_on_demand_checkpoint and trainer.strategy.cluster_resolver:
        resolver, step = trainer.strategy.cluster_resolver, trainer.global_step
        actions.append(
            orbit.actions.SaveCheckpointIfPreempted(resolver, checkpoint_manager, step, keep_running_after_save=True)
        )
    return actions
