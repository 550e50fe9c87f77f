"""EvaluatedWeights: the averaged weights, in place of the trained ones while an evaluation runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer_kit.checkpoints.state.train_state import TrainState


class EvaluatedWeights:
    """Puts the moving average in place of the weights for an evaluation, and puts back what the evaluation changes.

    Eager, on the host.

    Args:
      state: of the run.
      average: a MovingAverage, or what has its `swap` and `swapped`; None: the weights themselves are evaluated.
    """

    def __init__(self, state: TrainState, average: Any) -> None:
        self._state, self._average = state, average

    def use_average(self) -> None:
        """Puts the moving average in place of the weights, if there is one."""
        with self._state.in_use:
            if self._average is not None and not self._average.swapped:
                self._average.swap()

    def put_back(self) -> None:
        """Puts the weights back, and gives the random generators the states that they had before the evaluation."""
        with self._state.in_use:
            self._state.put_generators_back()
            if self._average is not None and self._average.swapped:
                self._average.swap()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Has the moving average, if any, in place of the weights; a late save waits meanwhile."""
        with self._state.in_use:
            self.use_average()
            try:
                yield
            finally:
                self.put_back()
