"""Repairs best weights: exports missing ones again from the checkpoints of a run, before the run resumes.

The recorded evaluations decide which weights to keep. Some may be missing: a disk has lost them, or the config now
keeps more than before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from trainer_kit.checkpoints.commit import problem
from trainer_kit.distribution.collectives import broadcast_from_chief
from trainer_kit.distribution.replica_values import own_to_each_replica, put_replica_values, replica_values
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.named_bests import EXPORTERS

_LOG = logging.getLogger(__name__)


def put_back_lost(
    trainer: Any, model_dir: str, start: str | None, reads: Callable[[int | None], None] = lambda _: None
) -> None:
    """Exports missing best weights from the checkpoints of their steps.

    Runs eagerly, in strategy scope, on every worker.

    Only the weights, their average and the global step change meanwhile.

    Args:
      trainer: The trainer, whose checkpoint_exporter has resumed.
      model_dir: The folder of the run that saved the checkpoints.
      start: The checkpoint to restore at the end; None leaves the trainer with any weights.
      reads: Called with the step of the checkpoint that must not be removed, and with None at the end.

    Raises:
      StorageError: when weights cannot be written.
    """
    exporter = trainer.checkpoint_exporter
    if not isinstance(exporter, EXPORTERS):
        return
    if start is not None and not trainer.state.fits(start):
        return  # it was restored in part and could not be restored at the end
    own = own_to_each_replica(trainer.model.variables, trainer.strategy)
    before: list[Any] = []  # each replica's local values; a checkpoint holds only those of the first replica

    def remember() -> None:
        if not before:
            before.append(replica_values(own, trainer.strategy) if own else [])

    try:
        for best in [exporter] if isinstance(exporter, BestCheckpoint) else exporter:
            _put_back(best, trainer, model_dir, reads, remember)
    finally:
        reads(None)
        if before and start is not None:
            trainer.state.restore_weights(start)
            if own:
                put_replica_values(own, trainer.strategy, before[0])


def _put_back(
    best: BestCheckpoint,
    trainer: Any,
    model_dir: str,
    reads: Callable[[int | None], None],
    remember: Callable[[], None],
) -> None:
    """Exports the missing weights of one exporter; calls `remember` before the trainer's weights change."""
    chief = bool(trainer.strategy.extended.should_checkpoint)
    unfit: set[int] = set()

    def saved(step: int) -> bool:
        reads(step)
        return step not in unfit and not problem(os.path.join(model_dir, f"ckpt-{step}"))

    while True:
        lost = best.lost(saved) if chief else []
        step = broadcast_from_chief(trainer.strategy, lost[0] if lost else -1)
        if step < 0:
            return
        reads(step)
        remember()
        try:
            trainer.state.restore_weights(os.path.join(model_dir, f"ckpt-{step}"))
        except (StorageError, UsageError) as error:
            _LOG.warning("%s", error)
            unfit.add(step)
            continue
        with trainer.averaged_weights(trainer.weights_of_metric(best.metric_name)):
            best.put_back(trainer.state.weights, step)
