"""Creates the checkpoint manager of a run from its config."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.durations import RoundedSteps, seconds_of
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.distribution.collectives import broadcast_from_chief, is_chief, worker_index
from trainer_kit.process.run_directory import RunIdentity

_LOG = logging.getLogger(__name__)


def create_manager(
    trainer: Any,
    config: ExperimentConfig,
    model_dir: str,
    *,
    asynchronous: bool = True,
    partial: bool = False,
    from_step: int | None = None,
    check_folder: Callable[[], None] = lambda: None,
    before_files: Callable[[], None] = lambda: None,
    recorded: Callable[[int], dict[str, Any]] = lambda _: {},
    spared: Callable[[Sequence[int]], set[int]] = lambda _: set(),
) -> CheckpointManager:
    """Returns the manager of the run's checkpoints; to be called on all workers together.

    Args:
      trainer: The trainer whose state the checkpoints hold.
      config: The config of the experiment.
      model_dir: The run's folder.
      asynchronous, partial, from_step, check_folder, before_files, recorded, spared: See
        CheckpointManager.
    """
    options, trains = config.trainer, trainer.trains
    trainer.state.step_state.allow_partial = partial
    return CheckpointManager(
        trainer.checkpoint,
        model_dir,
        max_to_keep=options.max_to_keep,
        step_counter=trainer.global_step,
        checkpoint_interval=_steps_between(options, trains),
        seconds=seconds_of(options.checkpoint_interval),
        init_fn=trainer.initialize,
        asynchronous=asynchronous,
        for_training=trains,
        keeps=is_chief(trainer.strategy),
        worker=worker_index(trainer.strategy),
        check_folder=check_folder,
        before_save=trainer.before_save if trains else lambda _: None,
        after_restore=trainer.after_restore,
        before_files=before_files,
        sound=trainer.state.is_sound if options.recovery_max_trials >= 0 else lambda: True,
        agree=lambda number: broadcast_from_chief(trainer.strategy, number),
        spared=spared,
        partial=partial,
        loose=trainer.state.loose,
        run_id=RunIdentity(model_dir),
        recorded=recorded,
        from_step=from_step,
    )


def _steps_between(options: TrainerConfig, trains: bool) -> int | None:
    """Returns the config's interval, None if it is a time; warns when loops are longer."""
    interval = options.checkpoint_interval
    if not isinstance(interval, int):
        return None
    # Loops are cut where an interval of rounded steps is due.
    if trains and not isinstance(interval, RoundedSteps) and interval < options.steps_per_loop:
        _LOG.warning(
            "trainer.checkpoint_interval=%d is less than trainer.steps_per_loop=%d, but checkpoints are saved only at "
            "the ends of loops; lower trainer.steps_per_loop or raise trainer.checkpoint_interval",
            interval,
            options.steps_per_loop,
        )
    return interval
