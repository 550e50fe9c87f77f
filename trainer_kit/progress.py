"""Where a run is, as its heartbeat and its watchdog ask from their threads, and what is saved when time runs out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from trainer_kit.telemetry.time_ledger import TimeLedger

BETWEEN = "report"  # the phase between loops: actions, reports, and what decides how to go on
_LOG = logging.getLogger(__name__)


class Phases:
    """What the main thread of a run is doing, and how long it did what.

    Args:
      times: counts the time of each phase.

    Attributes:
      now: start, train, evaluate, save, wait (for a checkpoint), report (between loops) or end.
      times: as given.
    """

    def __init__(self, times: TimeLedger) -> None:
        self.now, self.times = "start", times

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Sets the phase; after an error it stays, to tell where that came from."""
        before, self.now = self.now, phase
        with self.times.during(phase):
            yield
        self.now = before

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Names the phase between loops, and that after all of them."""
        self.times.end_start()
        self.now = BETWEEN
        with self.times.during(BETWEEN):
            yield
        self.now = "end"


class Progress:
    """Tells phase and step; before there is a controller, that the run is starting.

    Attributes:
      controller: set once it is made.
      trainer: set with it.
      times: what the run spends its time on, from now on.
    """

    def __init__(self) -> None:
        self.times = TimeLedger()
        self.controller: Any = None
        self.trainer: Any = None

    def follow(self, controller: Any, trainer: Any) -> None:
        """Tells of a run from now on."""
        self.controller, self.trainer = controller, trainer

    def of_step(self) -> tuple[str, int]:
        """Returns (phase, global step), for the heartbeat."""
        step = 0 if self.trainer is None else int(self.trainer.global_step.numpy())
        return getattr(self.controller, "phase", "start"), step

    def of_work(self) -> tuple[str, object]:
        """Returns (phase, token): the token changes with every training and evaluation step, for the watchdog.

        Waiting for a checkpoint has its own limit and counts as progress.
        """
        phase, step = self.of_step()
        if phase == "wait":
            return phase, time.monotonic()
        batches = getattr(self.trainer, "evaluated_batches", None)
        return phase, step if batches is None or phase != "evaluate" else f"{step}, batch {int(batches.numpy())}"

    def of_evaluation(self) -> tuple[bool, int, int]:
        """Returns whether an evaluation is under way, its global step (else 0), and the batches evaluated so far.

        Asked for often: while there is no evaluation it reads nothing but a variable on the host.
        """
        batches = getattr(self.trainer, "evaluated_batches", None)
        if batches is None:
            return False, 0, 0
        evaluates = getattr(self.controller, "phase", "") == "evaluate"
        return evaluates, self.of_step()[1] if evaluates else 0, int(batches.numpy())

    def evaluation_batches(self) -> int | None:
        """Returns how many batches an evaluation has, as far as the trainer knows."""
        tell = getattr(self.trainer, "evaluation_batches", None)
        return None if tell is None else tell()

    def save_late(self) -> bool:
        """Saves what can be saved while the main thread does not come back; in another thread.

        Between training loops the variables hold still: an evaluation that compiles, or a long one, changes none. In
        the middle of a training step nothing can be saved.

        Returns:
          Whether all is saved, and nothing is left to wait for.
        """
        controller, trainer = self.controller, self.trainer
        if controller is None or trainer is None or controller.phase not in ("train", "evaluate", BETWEEN):
            return False
        if getattr(trainer, "stop_agreed", None) is not None:
            _LOG.warning("the workers have not come to the end of a step together: only the checkpoints there are stay")
            return False  # a save takes all workers
        step, saved = int(trainer.global_step.numpy()), controller.saved_step
        if controller.phase == "train":
            if step > max(saved, 0):
                _LOG.warning("a training step takes long: if it takes longer, the steps after %d are lost", saved)
            return False
        trainer.end_averaging()
        if step > max(saved, 0):
            controller.save_checkpoint()
            _LOG.warning("stopped in the middle of an evaluation or a report; saved step %d", step)
        controller.sync()
        return True
