"""Watches a folder for new checkpoints, for an evaluation outside the process that saves them."""

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
_LOG_SECONDS = 300.0


class WatchedRun(Protocol):
    """The information about a training run that an evaluation in another process needs."""

    def finished(self) -> bool:
        """Whether the run will save no more checkpoints."""

    def alive(self) -> bool:
        """Whether anything besides a new checkpoint shows that the run continues."""

    def trainer(self) -> str:
        """Describes the training process, for messages."""

    def went_back_to(self) -> int | None:
        """Returns the step that the run has gone back to since the last call; None if it has not."""

    def evaluated(self) -> set[int]:
        """Returns the steps with a recorded evaluation."""

    def record(
        self,
        step: int,
        logs: Mapping[str, Any],
        seconds: float | Mapping[str, float],
        checkpoint: str,
    ) -> None:
        """Records an evaluation that was reported."""

    def need(self, after: int | None, reads: int | None) -> None:
        """Keeps the run from removing checkpoints: those after step `after` and that of step `reads`; None: none."""


class UnmonitoredRun:
    """A run that is known only by its checkpoints and by `finished`, which tells whether more will come."""

    def __init__(self, finished: Callable[[], bool]) -> None:
        self.finished = finished

    def alive(self) -> bool:
        """Returns False: there is no sign of life."""
        return False

    def trainer(self) -> str:
        """Returns that the training process is not known."""
        return "it is not known which process trains there"

    def went_back_to(self) -> int | None:
        """Returns None: rewinds are not known."""
        return None

    def evaluated(self) -> set[int]:
        """Returns no steps, since there are no records."""
        return set()

    def record(
        self,
        step: int,
        logs: Mapping[str, Any],
        seconds: float | Mapping[str, float],
        checkpoint: str,
    ) -> None:
        """Keeps no record."""

    def need(self, after: int | None, reads: int | None) -> None:
        """Does nothing: the run cannot be informed."""


class CheckpointWatcher:
    """Yields each checkpoint of a folder once, including those that are saved later.

    Args:
      directory: The folder of the checkpoints.
      timeout: The seconds to wait for a checkpoint without a sign of life of the run; None waits
        without limit.
      run: The run that saves the checkpoints.
      newest_only: Whether to skip all but the newest checkpoint; otherwise all come in the order of
        steps.
    """

    def __init__(
        self, directory: str, timeout: float | None, run: WatchedRun, newest_only: bool = False
    ) -> None:
        self._directory, self._timeout, self._run, self._newest_only = (
            directory,
            timeout,
            run,
            newest_only,
        )
        self._passed: set[int] = set()  # steps that were yielded, skipped or lost
        self._queued: set[int] = set()  # steps that were seen and still have to be yielded
        self._foreign: set[str] = set()  # prefixes of checkpoints that another run saved
        self.left_out = 0

    def follow(
        self, stopping: Callable[[], bool], waiting: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[str]:
        """Yields the prefix of each checkpoint until the run is finished or `stopping` returns True.

        Args:
          stopping: Returns whether to end.
          waiting: Returns a context manager that is entered while waiting.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although the run is not finished.
        """
        since, logged = time.monotonic(), -_LOG_SECONDS
        while not stopping():
            ended = (
                self._run.finished()
            )  # read before looking for checkpoints, so that the last ones are seen
            path = self._next()
            if path is not None:
                yield path
                since, logged = time.monotonic(), -_LOG_SECONDS
                continue
            if ended:
                return
            now = time.monotonic()
            if self._run.alive():
                since = now
            elif self._timeout is not None and now - since >= self._timeout:
                raise NothingToWaitForError(
                    f"no new checkpoint for {now - since:.0f} s (trainer.continuous_eval_timeout)"
                    f" in {self._directory}: {self._seen()}; {self._run.trainer()}"
                )
            if now - logged >= _LOG_SECONDS:
                limit = "no time limit"
                if self._timeout is not None:
                    limit = f"at most {self._timeout:g} s without a sign of life"
                pattern = f"{self._directory}/ckpt-*.index"
                _LOG.info(
                    "waiting for %s (%s); %s; %s", pattern, self._seen(), self._run.trainer(), limit
                )
                logged = now
            with waiting():
                time.sleep(_POLL_SECONDS)

    def _is_foreign(self, prefix: str) -> bool:
        """Whether another run saved the checkpoint; warns once."""
        if prefix not in self._foreign and is_foreign(prefix, read_run_id(self._directory)):
            _LOG.warning("%s was saved by another run; it is not evaluated", prefix)
            self._foreign.add(prefix)
        return prefix in self._foreign

    def _next(self) -> str | None:
        """Returns the prefix of the next checkpoint, which the run keeps from now on; None if there is none."""
        back = self._run.went_back_to()
        if back is not None:
            self._passed = {step for step in self._passed if step <= back}
            self._queued = {step for step in self._queued if step <= back}
        known = self._run.evaluated() | self._passed
        last = max(known, default=-1)
        there = complete_checkpoints(self._directory)
        new = [
            step for step in there if step not in known and (step > last or not self._newest_only)
        ]
        new = [step for step in new if not self._is_foreign(there[step])]
        self._report_lost(self._queued - set(there) - known)
        if self._newest_only:
            skipped = new[:-1]
            new = new[-1:]
            self._passed |= set(skipped)
            self.left_out += len(skipped)
            if skipped:
                _LOG.info(
                    "skipped: %s; a newer checkpoint exists (trainer.continuous_eval.policy=latest;"
                    " %d skipped in all)",
                    ", ".join(f"ckpt-{step}" for step in skipped),
                    self.left_out,
                )
        self._queued = set(new)
        for step in new:
            self._run.need(None if self._newest_only else step - 1, step)
            self._passed.add(step)
            if os.path.exists(f"{there[step]}.index"):
                return there[step]
            self._report_lost({step})
        self._run.need(None if self._newest_only else last, None)
        return None

    def _report_lost(self, steps: set[int]) -> None:
        self._passed |= steps
        self.left_out += len(steps)
        if steps:
            _LOG.warning(
                "%s: removed before evaluation (%d in all); the run keeps at most "
                "trainer.continuous_eval.max_wait_checkpoints checkpoints for evaluations",
                ", ".join(f"ckpt-{step}" for step in sorted(steps)),
                self.left_out,
            )

    def _seen(self) -> str:
        """Describes the contents of the folder, for messages."""
        if not os.path.isdir(self._directory):
            return "the folder does not exist"
        there = list(complete_checkpoints(self._directory))
        if there:
            return f"the newest checkpoint, ckpt-{there[-1]}, was already handled"
        names = sorted(
            set(os.listdir(self._directory)) - {"evals"}
        )  # the evaluation itself creates evals/
        return (
            f"the folder holds no checkpoint, only {', '.join(names[:5])}"
            if names
            else "the folder is empty"
        )
