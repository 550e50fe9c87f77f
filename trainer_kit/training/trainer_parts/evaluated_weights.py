"""EvaluatedWeights: replaces the trained weights by a moving average while an evaluation runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.optimization import WEIGHTS
from trainer_kit.errors import UsageError, suggestion


class EvaluatedWeights:
    """Replaces the weights by a moving average for an evaluation, and restores the state after it.

    Runs eagerly, on the host.

    Args:
      state: The TrainState of the run.
      average: A MovingAverage, or an object with `swap`, `swapped`, `names` and `evaluated`; None: the weights
        themselves are evaluated.

    Attributes:
      main: What evaluations use: the name of an average, or "weights".
      others: What is evaluated in addition, in order.
    """

    def __init__(self, state: TrainState, average: Any) -> None:
        self._state, self._average = state, average
        evaluated: tuple[str, ...] = average.evaluated if average is not None else (WEIGHTS,)
        self.main, self.others = evaluated[0], evaluated[1:]
        self._selected = self.main

    @property
    def averages(self) -> list[str]:
        """The names of all averages."""
        return [] if self._average is None else list(self._average.names)

    def use_average(self) -> None:
        """Replaces the weights by the selected average, if it is one."""
        with self._state.in_use:
            self._hold(self._selected)

    def put_back(self) -> None:
        """Restores the weights, and the states that the random generators had before the evaluation."""
        with self._state.in_use:
            self._state.put_generators_back()
            self._hold(WEIGHTS)

    @contextlib.contextmanager
    def selected(self, name: str) -> Iterator[None]:
        """Selects what `use_average` uses inside this context; the weights are back after it."""
        self._selected = name
        try:
            yield
        finally:
            self._selected = self.main
            self.put_back()

    @contextlib.contextmanager
    def averaged(self, name: str = "") -> Iterator[None]:
        """Replaces the weights by an average inside this context; a late save waits meanwhile.

        Args:
          name: The name of an average, or "weights"; "": what evaluations use.

        Raises:
          UsageError: when there is no such average.
        """
        self._check(name)
        with self._state.in_use:
            self._hold(name or self._selected)
            try:
                yield
            finally:
                self.put_back()

    def of_metric(self, metric: str, sets: Collection[str]) -> tuple[str, str]:
        """Returns the weights of a metric of an evaluation, and its name without theirs.

        Args:
          metric: The metric's name in the logs; nested names are joined by `|`.
          sets: The names of the validation sets; empty for a single one.
        """
        own, bar, rest = metric.partition("|") if metric.partition("|")[0] in sets else ("", "", metric)
        name, _, inner = rest.partition("|")
        return (name, f"{own}{bar}{inner}") if name in self.others else (self.main, metric)

    def _check(self, name: str) -> None:
        known = [WEIGHTS, *self.averages]
        if name and name not in known:
            raise UsageError(f"the run keeps no average {name!r} of the weights; {suggestion(name, known)}")

    def _hold(self, name: str) -> None:
        """Gives the model the average of this name, or the weights; each replica has its own values then."""
        self._state.model_replicas.put_back()
        held = "" if self._average is None else self._average.swapped
        if self._average is None or held == ("" if name == WEIGHTS else name):
            return
        if held:
            self._average.swap(held)
        if name != WEIGHTS:
            self._average.swap(name)
