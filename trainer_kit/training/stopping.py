"""How a running loop is ended before its next step, by one worker or by several together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.workers import sum_over_workers, worker_count
from trainer_kit.training.loops.host_variables import stop_variable

AGREE_EVERY = 10  # steps, or batches of an evaluation, after which several workers agree whether to stop


class Stopping:
    """The methods of a trainer that concern stops; to be inherited from."""

    _strategy: tf.distribute.Strategy

    def init_stopping(self) -> None:
        """Makes the flags that loops look at; in strategy scope."""
        self._stop, self._stop_asked = stop_variable(), stop_variable()
        self._workers = worker_count(self._strategy)
        self._asked_at: float | None = None

    def request_stop(self) -> None:
        """Ends the running loop before its next step; safe from another thread.

        The run saves its state and raises PreemptedError, as after SIGTERM; the same command goes on from there.

        Several workers end it together, after AGREE_EVERY steps at most. One that left alone would leave the others
        waiting for its gradients.
        """
        self._asked_at = self._asked_at or time.monotonic()
        self._stop_asked.assign(True)
        if self._workers == 1:
            self._stop.assign(True)

    @property
    def stop_requested(self) -> bool:
        """Whether loops stop now; with several workers, the same on all of them."""
        return bool(self._stop.numpy())

    @property
    def stopping_for(self) -> float:
        """The seconds since this process was asked to stop; 0 if it was not."""
        return time.monotonic() - self._asked_at if self._asked_at else 0.0

    @property
    def stop_agreed(self) -> bool | None:
        """Whether all workers have agreed to stop; None where there is only one."""
        return self.stop_requested if self._workers > 1 else None

    @tf.autograph.experimental.do_not_convert
    def agree_to_stop(self, count: tf.Variable) -> None:
        """Ends the loop on all workers alike if one was asked to stop; in graph, after each step.

        Args:
          count: of the steps; the same on all workers.
        """
        if self._workers == 1:
            return

        def agree() -> tf.Tensor:
            asked = sum_over_workers(self._strategy, tf.cast(self._stop_asked, tf.int32))
            self._stop.assign(asked > 0)
            return asked

        tf.cond(tf.equal(count % AGREE_EVERY, 0), agree, lambda: 0)


def is_stopping(trainer: Any, asked: Callable[[], bool]) -> bool:
    """Whether a run has to stop: of several workers, whether they have agreed to. Eager, on the host.

    Args:
      trainer: of the run, a DrivenTrainer.
      asked: tells whether something else than the trainer, such as a signal, asked this process to stop.
    """
    agreed = trainer.stop_agreed
    return asked() or bool(trainer.stop_requested) if agreed is None else bool(agreed)
