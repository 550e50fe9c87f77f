"""Adds the state of a trainer that is not in variables to its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer_kit.optimizers.learning_rate import ConfiguredRates
from trainer_kit.training.trainer_parts.interrupted_metrics import InterruptedMetrics
from trainer_kit.training.trainer_parts.own_state import has_own_state


def keep_python_state(trainer: Any, metrics: Callable[[], Sequence[Any]]) -> None:
    """Adds the state that is not in variables to every checkpoint of a trainer.

    Args:
      trainer: The trainer, with its data.
      metrics: A function that returns the variables of the training metrics.
    """
    rates, parts = ConfiguredRates(trainer.optimizer), trainer.state.python_state
    parts.add("data", trainer.data.state, trainer.data.put_state)
    of_loop = InterruptedMetrics(trainer, metrics, trainer.strategy)
    parts.add("metrics", of_loop.state, of_loop.restore)
    parts.add("learning rates", rates.state, rates.restore)
    trainer.state.keep_replicas(trainer.strategy)
    if has_own_state(trainer.task):
        restore = trainer.task.restore
        parts.add("task", trainer.task.state, lambda state: None if state is None else restore(state))
