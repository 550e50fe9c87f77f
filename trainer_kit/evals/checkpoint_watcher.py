"""Watches a folder for new checkpoints, for an evaluation in another process than the run that saves them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import is_foreign
from trainer_kit.errors import NothingToWaitForError
from trainer_kit.process.run_directory import read_run_id

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_TELL_SECONDS = 300.0


class WatchedRun(Protocol):
    """What an evaluation in another process knows of the training run."""

    def finished(self) -> bool:
        """Whether no more checkpoints will come."""

    def alive(self) -> bool:
        """Whether anything but a new checkpoint tells that the run goes on."""

    def trainer(self) -> str:
        """What is known of who trains, for messages."""

    def went_back_to(self) -> int | None:
        """Returns the step that the run has gone back to since this was last asked; None if it has not."""

    def evaluated(self) -> set[int]:
        """Returns the steps whose evaluation is on record."""

    def record(self, step: int, logs: Mapping[str, Any], seconds: float | Mapping[str, float], checkpoint: str) -> None:
        """Notes an evaluation, which was reported."""

    def need(self, after: int | None, reads: int | None) -> None:
        """Keeps the run from removing checkpoints: all after one step, and the one that is read."""


class Unknown:
    """A run of which nothing is known but its checkpoints and, from `finished`, whether there will be more."""

    def __init__(self, finished: Callable[[], bool]) -> None:
        self.finished = finished

    def alive(self) -> bool:
        """Nothing tells."""
        return False

    def trainer(self) -> str:
        """Nothing tells."""
        return "nothing tells who trains there"

    def went_back_to(self) -> int | None:
        """Nothing tells."""
        return None

    def evaluated(self) -> set[int]:
        """None is on record."""
        return set()

    def record(self, step: int, logs: Mapping[str, Any], seconds: float | Mapping[str, float], checkpoint: str) -> None:
        """Keeps no record."""

    def need(self, after: int | None, reads: int | None) -> None:
        """Cannot be told to anyone."""


class CheckpointWatcher:
    """Yields each checkpoint of a folder once, also those that are saved later.

    Args:
      directory: the folder of the checkpoints.
      timeout: seconds to wait for one while the run does not show that it is alive; None: for ever.
      run: the run that saves the checkpoints.
      newest_only: take the newest one next and leave out those before it; else all, in the order of steps.
    """

    def __init__(self, directory: str, timeout: float | None, run: WatchedRun, newest_only: bool = False) -> None:
        self._directory, self._timeout, self._run, self._newest_only = directory, timeout, run, newest_only
        self._passed: set[int] = set()  # what was taken, whatever became of it
        self._queued: set[int] = set()  # what was seen, and has to be taken
        self._foreign: set[str] = set()  # prefixes of checkpoints that another run has saved
        self.left_out = 0

    def follow(
        self, stopping: Callable[[], bool], waiting: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[str]:
        """Yields the prefix of each checkpoint, until the run is finished or `stopping` says so.

        Args:
          stopping: tells whether to end.
          waiting: entered while it waits.

        Raises:
          NothingToWaitForError: when none came in time although more were to come.
        """
        since, told = time.monotonic(), -_TELL_SECONDS
        while not stopping():
            ended = self._run.finished()  # asked before the look, so that the last ones are seen
            path = self._next()
            if path is not None:
                yield path
                since, told = time.monotonic(), -_TELL_SECONDS
                continue
            if ended:
                return
            now = time.monotonic()
            if self._run.alive():
                since = now
            elif self._timeout is not None and now - since >= self._timeout:
                raise NothingToWaitForError(self._nothing_came(now - since))
            if now - told >= _TELL_SECONDS:
                _LOG.info("%s", self._what_is_waited_for())
                told = now
            with waiting():
                time.sleep(_POLL_SECONDS)

    def _is_foreign(self, prefix: str) -> bool:
        """Whether another run has saved the checkpoint; says so once."""
        if prefix not in self._foreign and is_foreign(prefix, read_run_id(self._directory)):
            _LOG.warning("%s was saved by another run; it is not evaluated", prefix)
            self._foreign.add(prefix)
        return prefix in self._foreign

    def _next(self) -> str | None:
        """Returns the prefix of the checkpoint to take next, which the run keeps from now on; None if there is none."""
        back = self._run.went_back_to()
        if back is not None:
            self._passed = {step for step in self._passed if step <= back}
            self._queued = {step for step in self._queued if step <= back}
        known = self._run.evaluated() | self._passed
        last = max(known, default=-1)
        there = complete_checkpoints(self._directory)
        new = [step for step in there if step not in known and (step > last or not self._newest_only)]
        new = [step for step in new if not self._is_foreign(there[step])]
        self._tell_lost(self._queued - set(there) - known)
        if self._newest_only:
            self._tell_left_out(new[:-1])
            new = new[-1:]
        self._queued = set(new)
        for step in new:
            self._run.need(None if self._newest_only else step - 1, step)
            self._passed.add(step)
            if os.path.exists(f"{there[step]}.index"):
                return there[step]
            self._tell_lost({step})
        self._run.need(None if self._newest_only else last, None)
        return None

    def _tell_lost(self, steps: set[int]) -> None:
        self._passed |= steps
        self.left_out += len(steps)
        if steps:
            _LOG.warning(
                "%s: removed before it was evaluated (%d in all); the run keeps at most "
                "trainer.continuous_eval.max_wait_checkpoints checkpoints for evaluations",
                ", ".join(f"ckpt-{step}" for step in sorted(steps)),
                self.left_out,
            )

    def _tell_left_out(self, steps: list[int]) -> None:
        self._passed |= set(steps)
        self.left_out += len(steps)
        if steps:
            _LOG.info(
                "left out: %s; a newer one is there (trainer.continuous_eval.policy=latest; %d left out in all)",
                ", ".join(f"ckpt-{step}" for step in steps),
                self.left_out,
            )

    def _what_is_waited_for(self) -> str:
        limit = "for ever" if self._timeout is None else f"at most {self._timeout:g} s without a sign of life"
        return f"waiting for {self._directory}/ckpt-*.index ({self._seen()}); {self._run.trainer()}; {limit}"

    def _nothing_came(self, seconds: float) -> str:
        return (
            f"no new checkpoint for {seconds:.0f} s (trainer.continuous_eval_timeout) in {self._directory}: "
            f"{self._seen()}; {self._run.trainer()}"
        )

    def _seen(self) -> str:
        """What is in the folder, for who waits there in vain."""
        if not os.path.isdir(self._directory):
            return "there is no such folder"
        there = list(complete_checkpoints(self._directory))
        if there:
            return f"the newest one there is ckpt-{there[-1]}, which is dealt with"
        names = sorted(set(os.listdir(self._directory)) - {"evals"})  # which the evaluation has made itself
        return f"no checkpoint is there, but {', '.join(names[:5])}" if names else "the folder is empty"
