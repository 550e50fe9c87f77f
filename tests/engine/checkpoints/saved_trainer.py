"""The part of a trainer that a checkpoint manager uses, for tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.durations import Duration
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.process.run_directory import RunDirectory


class SavedTrainer:
    """A trainer with a checkpoint and a step; tests replace the methods that they look at.

    Args:
      checkpoint: The checkpoint of its state.
      global_step: The global step.
      **attributes: Attributes to replace.
    """

    can_train = True
    state: Any = SimpleNamespace(optional_sections=(), all_finite=lambda: True)

    def __init__(
        self, checkpoint: tf.train.Checkpoint, global_step: tf.Variable, **attributes: Any
    ) -> None:
        self.checkpoint = checkpoint
        self.global_step = global_step
        self.strategy = tf.distribute.get_strategy()
        vars(self).update(attributes)

    def initialize(self) -> None:
        """Does nothing."""

    def before_save(self, prefix: str) -> None:
        """Does nothing."""

    def after_restore(self, path: str) -> None:
        """Does nothing."""


class NamedRun(RunDirectory):
    """The directory of a run whose identity does not come from a manifest."""

    def __init__(self, folder: Path | str, run_id: str = "") -> None:
        super().__init__(str(folder), TrainerConfig())
        self._name = run_id

    @property
    def run_id(self) -> str:
        """The identity of the run."""
        return self._name


def manager_of(
    trainer: Any,
    folder: Path | str,
    *,
    max_to_keep: int = 3,
    interval: int | Duration | None = 1,
    run_id: str = "",
    from_step: int | None = None,
    **arguments: Any,
) -> CheckpointManager:
    """Returns a manager of a trainer's checkpoints in a folder, which is prepared."""
    options = TrainerConfig(max_to_keep=max_to_keep, checkpoint_interval=interval, steps_per_loop=1)
    manager = CheckpointManager(trainer, NamedRun(folder, run_id), options, **arguments)
    manager.prepare_folder(from_step)
    return manager
