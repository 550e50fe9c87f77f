"""What happens after training loops and evaluations, by the names and signatures of official.core.actions."""

from __future__ import annotations

import importlib
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.compat.model_garden.actions.averages import EMACheckpointing, is_averaging
from trainer_kit.compat.model_garden.actions.recovery import RecoveryAction, RecoveryCondition
from trainer_kit.compat.model_garden.config.gin_names import configurable
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer import Trainer

__all__ = [
    "EMACheckpointing",
    "PruningAction",
    "RecoveryAction",
    "RecoveryCondition",
    "get_eval_actions",
    "get_train_actions",
]


class PruningAction:
    """Takes the pruning of a tf_keras model a step further after each training loop, and writes its summaries.

    A model whose layers are wrapped by tensorflow_model_optimization cannot be trained without.

    Args:
      export_dir: folder of the summaries.
      model: of tf_keras; its `optimizer` is set.
      optimizer: which knows the steps that were taken.

    Raises:
      UsageError: when tensorflow_model_optimization cannot be imported.
    """

    def __init__(self, export_dir: str, model: Any, optimizer: Any) -> None:
        try:
            pruning = importlib.import_module("tensorflow_model_optimization").sparsity.keras
        except ImportError as error:
            raise UsageError(
                f"pruning needs tensorflow_model_optimization, which cannot be imported ({error}); "
                "pip install tensorflow-model-optimization, or remove task.pruning"
            ) from error
        self.update_pruning_step = pruning.UpdatePruningStep()
        self.update_pruning_step.set_model(model)
        self.update_pruning_step.on_train_begin()
        self.pruning_summaries = pruning.PruningSummaries(log_dir=export_dir)
        model.optimizer = optimizer
        self.pruning_summaries.set_model(model)

    def __call__(self, output: Any) -> None:
        """Updates the pruning step and writes the summaries; eager, on the host.

        Args:
          output: of the training loop.
        """
        del output
        self.update_pruning_step.on_epoch_end(batch=None)
        self.pruning_summaries.on_epoch_begin(epoch=None)


@configurable("official.core.actions.get_eval_actions")
def get_eval_actions(params: Any, trainer: Any, model_dir: str) -> list[Any]:
    """Returns what has to happen after each evaluation: where weights are averaged, saving the averages.

    Args:
      params: the experiment's config, of ours or of Model Garden.
      trainer: of ours or of Model Garden.
      model_dir: of the run.
    """
    most = params.trainer.max_to_keep
    if hasattr(trainer, "averaged_weights"):  # it has to know when they are in place, for a save that comes meanwhile
        if trainer._average is None:
            return []
        averaged = trainer.averaged_weights
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most, averaged=averaged)]
    if is_averaging(trainer.optimizer):
        return [EMACheckpointing(model_dir, trainer.optimizer, trainer.checkpoint, most)]
    return []


@configurable("official.core.actions.get_train_actions")
def get_train_actions(
    params: Any, trainer: Any, model_dir: str, checkpoint_manager: tf.train.CheckpointManager
) -> list[Any]:
    """Returns what has to happen after each training loop.

    For a Trainer of ours that is pruning: its runner goes back after a divergence, and saves when the run is preempted,
    by itself. Any other trainer gets, beside pruning, what the config says of these two.

    Args:
      params: the experiment's config, of ours or of Model Garden.
      trainer: of ours or of Model Garden.
      model_dir: of the run.
      checkpoint_manager: of the run's checkpoints.
    """
    actions: list[Any] = []
    if getattr(params.task, "pruning", None):
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
