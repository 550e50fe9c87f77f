"""InterruptedMetrics: the training metrics of a loop that a stop has interrupted, in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.replica_values import put_replica_values, replica_values

_LOG = logging.getLogger(__name__)


class InterruptedMetrics:
    """Saves and restores the metrics of an interrupted loop, which the next start continues. Runs eagerly, on the host.

    Args:
      trainer: The trainer; its `metrics_continue` says whether a checkpoint holds them, and is set after a restore.
      variables: A function that returns the variables of the training metrics, which may be created in a step.
      strategy: The strategy of the trainer.
    """

    def __init__(self, trainer: Any, variables: Callable[[], Sequence[Any]], strategy: tf.distribute.Strategy) -> None:
        self._trainer, self._variables, self._strategy = trainer, variables, strategy

    def state(self) -> Any:
        """Returns the values of the metrics on each replica; None if no loop was interrupted."""
        return replica_values(self._variables(), self._strategy) if self._trainer.metrics_continue else None

    def restore(self, state: Any) -> None:
        """Restores what `state` returned; if the run has other metrics now, warns and begins them again."""
        fits = state is not None and put_replica_values(self._variables(), self._strategy, state)
        self._trainer.metrics_continue = fits
        if state is not None and not fits:
            _LOG.warning(
                "the checkpoint holds the state of other metrics than this run has, so the first training metrics "
                "leave out a few steps"
            )
