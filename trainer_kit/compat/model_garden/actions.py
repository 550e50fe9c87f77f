"""Actions after training loops and evaluations, with the signatures of official.core.actions."""

from __future__ import annotations

import math
import os
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import orbit
import tensorflow as tf
from official.core import actions as model_garden_actions
from official.core.actions import PruningAction

# Looked up at import: a program may later replace it with that of trainer_kit.
from official.core.actions import get_eval_actions as model_garden_eval_actions

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.compat.model_garden.gin_bindings import accept_gin_bindings
from trainer_kit.config.schema.optimization import AVERAGE
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.metric_set import to_numpy
from trainer_kit.training.trainer import Trainer

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import AdaptableTrainer, ExperimentParams


@accept_gin_bindings("official.core.actions.get_eval_actions")
def get_eval_actions(
    params: ExperimentParams, trainer: AdaptableTrainer, model_dir: str
) -> list[orbit.Action]:
    """Returns the actions that run after each evaluation.

    If weights are averaged, one saves the averages.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      trainer: The trainer, trainer_kit's or Model Garden's.
      model_dir: The run's folder.
    """
    if not hasattr(trainer, "use_weights"):
        return list(model_garden_eval_actions(params, trainer, model_dir))
    if trainer._average is None:
        return []
    return [AveragesSaver(trainer, model_dir, params.trainer.max_to_keep)]


@accept_gin_bindings("official.core.actions.get_train_actions")
def get_train_actions(
    params: ExperimentParams,
    trainer: AdaptableTrainer,
    model_dir: str,
    checkpoint_manager: tf.train.CheckpointManager,
) -> list[orbit.Action]:
    """Returns the actions that run after each training loop.

    A Trainer of trainer_kit needs only pruning: its run recovers from divergence, and saves when
    preempted, without actions. Any other trainer also gets the recovery and preemption actions that
    the config asks for.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      trainer: The trainer, trainer_kit's or Model Garden's.
      model_dir: The run's folder.
      checkpoint_manager: The run's checkpoint manager.
    """
    actions: list[orbit.Action] = []
    if getattr(params.task, "pruning", None):
        # The package of pruning may be missing.
        with explain_config_errors("task.pruning"):
            actions.append(PruningAction(model_dir, trainer.model, trainer.optimizer))
    if isinstance(trainer, Trainer):
        return actions

    section = params.trainer
    if section.recovery_max_trials >= 0:
        condition = RecoveryCondition(
            trainer.global_step,
            section.loss_upper_bound,
            section.recovery_begin_steps,
            section.recovery_max_trials,
        )
        recovery = RecoveryAction(checkpoint_manager)
        actions.append(orbit.actions.ConditionalAction(condition, recovery))

    # A run of trainer_kit saves by itself when it is preempted, and TensorFlow's handler cannot use
    # its manager.
    saves_itself = isinstance(checkpoint_manager, CheckpointManager)
    if (
        section.preemption_on_demand_checkpoint
        and trainer.strategy.cluster_resolver
        and not saves_itself
    ):
        save_if_preempted = orbit.actions.SaveCheckpointIfPreempted(
            trainer.strategy.cluster_resolver,
            checkpoint_manager,
            trainer.global_step,
            keep_running_after_save=True,
        )
        actions.append(save_if_preempted)
    return actions


class GardenActionsTrainer(BaseTrainer):
    """A trainer whose own actions are those of Model Garden's factories, which gin can bind."""

    # Runs of Model Garden have curves of these names, which a resumed run continues.
    loss_tag = ""

    def build_train_actions(
        self, params: ExperimentParams, model_dir: str, manager: tf.train.CheckpointManager
    ) -> list[orbit.Action]:
        """Returns the actions that run after each training loop."""
        return get_train_actions(params, self, model_dir, checkpoint_manager=manager)

    def build_eval_actions(self, params: ExperimentParams, model_dir: str) -> list[orbit.Action]:
        """Returns the actions that run after each evaluation."""
        return get_eval_actions(params, self, model_dir)


class RecoveryCondition(model_garden_actions.RecoveryCondition):
    """Decides after each training loop whether the loss has diverged.

    It has Model Garden's arguments. A loss that is not finite has diverged at every step. When no
    trial is left, a DivergedError determines the exit code.
    """

    def __call__(self, outputs: orbit.runner.Output) -> bool:
        """Returns whether the run has to be restored. Runs eagerly, on the host.

        Args:
          outputs: The logs of the loop, with "training_loss".

        Raises:
          DivergedError: (a RuntimeError) When no recovery is left.
          UsageError: When the logs have no training loss.
        """
        if "training_loss" not in outputs:
            raise UsageError(
                f"a training loop returned {', '.join(outputs) or 'no logs'} and no training_loss, "
                "by which a run recovers from a divergence; return it from train_loop_end, or set "
                "trainer.recovery_max_trials=-1"
            )

        # Model Garden recognises NaN only, at every step. It compares an infinite loss with its
        # bound, from recovery_begin_steps on.
        loss = float(np.asarray(to_numpy(outputs["training_loss"])).item())
        if not math.isfinite(loss):
            outputs = {"training_loss": math.nan}
        try:
            return bool(super().__call__(outputs))
        except RuntimeError as error:
            step = int(to_numpy(self.global_step))
            raise DivergedError(
                f"{error} training_loss is {loss:g} at step {step}, and"
                f" recovery_max_trials={self.recovery_max_trials} is used up; lower the learning"
                " rate or clip gradients"
            ) from error


class RecoveryAction(model_garden_actions.RecoveryAction):
    """Restores the newest checkpoint.

    trainer_kit's manager passes over checkpoints that are not finite.
    """

    def __call__(self, _: orbit.runner.Output) -> None:
        """Restores the checkpoint. Runs eagerly, in strategy scope.

        Raises:
          DivergedError: (a RuntimeError) When there is no checkpoint.
        """
        self.checkpoint_manager.sync()
        if not self.checkpoint_manager.checkpoints:
            raise DivergedError(
                f"the run has diverged, and {self.checkpoint_manager.directory} has no checkpoint;"
                " save one before the first step, or save more often, and lower the learning rate"
                " or clip gradients"
            )
        super().__call__(_)


class AveragesSaver:
    """Saves a checkpoint with the averages in place of the model's weights.

    Model Garden's EMACheckpointing does the same. The checkpoint is
    `ema_checkpoints/average_weights-<step>` in `export_dir`. Afterwards the model has its weights
    back, bit by bit, even when the save fails. Of several workers only the chief leaves files.

    Args:
      trainer: The trainer. It knows when averages are in place, because a save may come meanwhile.
      export_dir: The folder that contains `ema_checkpoints`.
      max_to_keep: The number of newest checkpoints to keep.
    """

    def __init__(self, trainer: BaseTrainer, export_dir: str, max_to_keep: int = 1) -> None:
        folder = os.path.join(export_dir, "ema_checkpoints")

        # All workers take part in a save. The files of the others go with this object.
        self._temporary_folder: tempfile.TemporaryDirectory[str] | None = None
        if not trainer.strategy.extended.should_checkpoint:
            self._temporary_folder = tempfile.TemporaryDirectory(prefix="trainer_kit_worker_")
            folder = self._temporary_folder.name
        self._trainer = trainer
        self._manager = tf.train.CheckpointManager(
            trainer.checkpoint, folder, max_to_keep, checkpoint_name="average_weights"
        )

    def __call__(self, _: orbit.runner.Output) -> None:
        """Saves the averages. Runs eagerly, in strategy scope, on every worker."""
        step = int(to_numpy(self._trainer.global_step))
        with self._trainer.use_weights(AVERAGE):
            self._manager.save(checkpoint_number=step)
