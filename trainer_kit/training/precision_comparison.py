"""Trains the same model in two precisions, from the same start and on the same data, and compares them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.training.losses import reported_loss

_LOOPS = 10


@dataclass(frozen=True)
class PrecisionComparison:
    """What both trainings have measured.

    Attributes:
      losses: (step, loss of the first, loss of the second): the loss of the first step or steps, then means over loops.
      rates: The steps per second of both, of the median loop; they include the waits for batches.
      differences: The differences of the changes of the weights, by path of the variable, those that are not finite
        first, then the largest: the norm of the difference of both changes since the start, divided by the norm of the
        first one's change.
    """

    losses: Sequence[tuple[int, float, float]]
    rates: tuple[float, float]
    differences: dict[str, float]


class _Training:
    """One of the trainings."""

    def __init__(self, trainer: Any, start: Sequence[np.ndarray] | None) -> None:
        trainer.initialize()
        self.trainer, self._seconds = trainer, list[float]()  # of a step, by loop
        self._variables = list(trainer.model.trainable_variables)
        if start is not None:
            for variable, value in zip(trainer.model.variables, start, strict=True):
                variable.assign(value)
        self.start = [variable.numpy() for variable in trainer.model.variables]
        self._trained_from = [variable.numpy() for variable in self._variables]

    def train(self, steps: int) -> float:
        """Runs a loop and returns its loss."""
        start = time.perf_counter()
        logs = self.trainer.train(tf.constant(steps, tf.int32))
        self._seconds.append((time.perf_counter() - start) / steps)
        if self.trainer.data_ended:
            raise DataError(
                f"task.train_data ended before step {int(self.trainer.global_step.numpy()) + 1}; let it repeat, for "
                "example with dataset.repeat()"
            )
        return reported_loss(logs)

    def rate(self) -> float:
        """Returns the steps per second of the median loop, without the first one, which compiles the step."""
        return 1 / float(np.median(self._seconds[1:] or self._seconds))

    def paths(self) -> list[str]:
        """Returns the paths of the trainable variables."""
        return [variable_path(variable) for variable in self._variables]

    def changes(self) -> list[np.ndarray]:
        """Returns how far each trainable variable is from its start, float64."""
        values = [variable.numpy() for variable in self._variables]
        return [
            value.astype(np.float64) - start.astype(np.float64)
            for value, start in zip(values, self._trained_from, strict=True)
        ]


def compare(create: Callable[[str], Any], dtypes: tuple[str, str], steps: int) -> PrecisionComparison:
    """Trains two models in turn, in loops of a tenth of `steps` steps. Runs eagerly, on the host, in strategy scope.

    Args:
      create: A function that returns a new trainer with a new model for a runtime.mixed_precision_dtype.
      dtypes: Both dtypes; differences are relative to the first one.
      steps: The number of steps of each model.

    Raises:
      DataError: when the training data is empty or ends.
    """
    first = _Training(create(dtypes[0]), None)
    at_once = first.trainer.fuse_steps
    first_loss = first.train(at_once)  # the step is traced while the policy of Keras is that of this dtype
    second = _Training(create(dtypes[1]), first.start)
    losses = [(at_once, first_loss, second.train(at_once))]
    loop = max(1, steps // _LOOPS // at_once) * at_once
    while (done := losses[-1][0]) < steps:
        left = -(-(steps - done) // at_once) * at_once
        count = min(loop - done % loop, left)
        losses.append((done + count, first.train(count), second.train(count)))
    differences = [_relative(*changes) for changes in zip(first.changes(), second.changes(), strict=True)]
    largest = _largest_first(dict(zip(first.paths(), differences, strict=True)))
    return PrecisionComparison(losses, (first.rate(), second.rate()), largest)


def _largest_first(differences: dict[str, float]) -> dict[str, float]:
    """Sorts by value; values that are not finite come first, since NaN has no order."""
    by_value = sorted(differences.items(), key=lambda item: (math.isfinite(item[1]), -item[1]))
    return dict(by_value)


def _relative(change: np.ndarray, other: np.ndarray) -> float:
    norm = float(np.linalg.norm(change))
    return float(np.linalg.norm(change - other)) / norm if norm else 0.0
