"""EvaluatedWeights: replaces the trained weights by their moving average while an evaluation runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer_kit.checkpoints.state.train_state import TrainState


class EvaluatedWeights:
    """Replaces the weights by their moving average for an evaluation, and restores the state after it.

    Eager, on the host.

    Args:
      state: The TrainState of the run.
      average: A MovingAverage, or an object with `swap` and `swapped`; None: the weights themselves are evaluated.
    """

    def __init__(self, state: TrainState, average: Any) -> None:
        self._state, self._average = state, average

    def use_average(self) -> None:
        """Replaces the weights by the moving average, if there is one."""
        with self._state.in_use:
            if self._average is not None and not self._average.swapped:
                self._average.swap()

    def put_back(self) -> None:
        """Restores the weights, and the states that the random generators had before the evaluation."""
        with self._state.in_use:
            self._state.put_generators_back()
            if self._average is not None and self._average.swapped:
                self._average.swap()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replaces the weights by the moving average, if any, inside this context; a late save waits meanwhile."""
        with self._state.in_use:
            self.use_average()
            try:
                yield
            finally:
                self.put_back()
