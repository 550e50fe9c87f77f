"""StopFlag: ends a running loop before its next step, on one worker or on all workers together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.collectives import all_gather, sum_over_workers, worker_count
from trainer_kit.training.loops.host_variables import stop_variable

AGREE_EVERY = 10  # steps, or batches of an evaluation, after which several workers agree whether to stop


class StopFlag:
    """The flag that loops in graph check before each step.

    Args:
      strategy: The run's strategy.

    Attributes:
      variable: A bool scalar on the host; loops end when it is True.
      variables: All variables of the flag; checkpoints do not hold them.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.variable, self._asked = stop_variable(), stop_variable()
        self.variables = [self.variable, self._asked]
        self._strategy, self._workers = strategy, worker_count(strategy)
        self._asked_at: float | None = None

    def request(self) -> None:
        """Ends the running loop before its next step; safe from another thread.

        Several workers end it together, after AGREE_EVERY steps at most. If one worker stopped alone, the others would
        wait for its gradients for ever.
        """
        self._asked_at = self._asked_at or time.monotonic()
        self._asked.assign(True)
        if self._workers == 1:
            self.variable.assign(True)

    @property
    def requested(self) -> bool:
        """Whether running loops stop before their next step; the same on all workers."""
        return self._asked_at is not None if self._workers == 1 else bool(self.variable.numpy())

    @property
    def seconds(self) -> float:
        """The seconds since this process was asked to stop; 0 if it was not."""
        return time.monotonic() - self._asked_at if self._asked_at else 0.0

    @property
    def agreed(self) -> bool | None:
        """Whether all workers have agreed to stop; None if there is only one worker."""
        return self.requested if self._workers > 1 else None

    @tf.autograph.experimental.do_not_convert
    def agree(self, count: tf.Variable) -> None:
        """Ends the loop on all workers at the same step if one was asked to stop; runs in graph, after each step.

        Args:
          count: The counter of the steps; the same on all workers.
        """
        if self._workers == 1:
            return

        def agree() -> tf.Tensor:
            asked = sum_over_workers(self._strategy, tf.cast(self._asked, tf.int32))
            self.variable.assign(asked > 0)
            return asked

        tf.cond(tf.equal(count % AGREE_EVERY, 0), agree, lambda: 0)

    def agree_between_loops(self) -> None:
        """Lets all workers stop if one was asked to, for trainers whose loops do not call `agree`; runs eagerly."""
        if self._workers > 1:
            requests = all_gather(self._strategy, "stop" if self._asked_at else "continue")
            self.variable.assign("stop" in requests)


def is_stopping(trainer: Any, asked: Callable[[], bool]) -> bool:
    """Whether a run has to stop; with several workers, whether they have agreed to stop. Runs eagerly, on the host.

    Args:
      trainer: The run's trainer, a BaseTrainer.
      asked: A function that returns whether this process was asked to stop in another way, such as by a signal.
    """
    agreed = trainer.stop_agreed
    return asked() or bool(trainer.stop_requested) if agreed is None else bool(agreed)
