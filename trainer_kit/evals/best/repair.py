"""Repair of best weights: exports missing ones again from the checkpoints of a run, before the run resumes.

What is kept follows from the evaluations on record; what there are weights of may be less: a disk has lost them, or the
config keeps more than before.
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
    """Exports the best weights that are missing from the checkpoints of their steps; eager, in scope, on every worker.

    Only the weights, their average and the global step change meanwhile.

    Args:
      trainer: whose checkpoint_exporter has resumed.
      model_dir: of the run that has saved the checkpoints.
      start: the checkpoint whose weights the trainer has, and gets back; None: any will do afterwards.
      reads: told which checkpoint must not be removed, and at the end None.

    Raises:
      StorageError: when weights cannot be written.
    """
    exporter = trainer.checkpoint_exporter
    if not isinstance(exporter, EXPORTERS):
        return
    if start is not None and not trainer.state.fits(start):
        return  # it was restored in part, and could not be put back
    own = own_to_each_replica(trainer.model.variables, trainer.strategy)
    before: list[Any] = []  # of which a checkpoint holds the first replica's only

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
    """Exports what one of the bests lacks; calls `remember` before the trainer's weights change."""
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
        with trainer.averaged_weights():
            best.put_back(trainer.state.weights, step)
