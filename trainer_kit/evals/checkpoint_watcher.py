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

    def is_finished(self) -> bool:
        """Whether the run will save no more checkpoints."""

    def is_alive(self) -> bool:
        """Whether anything besides a new checkpoint shows that the run continues."""

    def describe_trainer(self) -> str:
        """Describes the training process, for messages."""

    def poll_rewind(self) -> int | None:
        """Returns the step that the run has gone back to since the last call; None if it has not."""

    def get_evaluated_steps(self) -> set[int]:
        """Returns the steps with a recorded evaluation."""

    def record(
        self,
        step: int,
        logs: Mapping[str, Any],
        seconds: float | Mapping[str, float],
        checkpoint: str,
    ) -> None:
        """Records an evaluation that was reported."""

    def protect_checkpoints(self, after_step: int | None, reading_step: int | None) -> None:
        """Keeps the run from removing checkpoints: those after `after_step` and that of `reading_step`; None: none."""


class UnmonitoredRun:
    """A run that is known only by its checkpoints and by `is_finished`, which tells whether more will come."""

    def __init__(self, is_finished: Callable[[], bool]) -> None:
        self.is_finished = is_finished

    def is_alive(self) -> bool:
        """Returns False: there is no sign of life."""
        return False

    def describe_trainer(self) -> str:
        """Returns that the training process is not known."""
        return "it is not known which process trains there"

    def poll_rewind(self) -> int | None:
        """Returns None: rewinds are not known."""
        return None

    def get_evaluated_steps(self) -> set[int]:
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

    def protect_checkpoints(self, after_step: int | None, reading_step: int | None) -> None:
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
        self._handled_steps: set[int] = set()  # steps that were yielded, skipped or lost
        self._queued_steps: set[int] = set()  # steps that were seen and still have to be yielded
        self._foreign_prefixes: set[str] = set()  # prefixes of checkpoints that another run saved
        self.unevaluated_count = 0

    def follow(
        self,
        should_stop: Callable[[], bool],
        enter_wait: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[str]:
        """Yields the prefix of each checkpoint until the run is finished or `should_stop` returns True.

        Args:
          should_stop: Returns whether to end.
          enter_wait: Returns a context manager that is entered while waiting.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although the run is not finished.
        """
        since, logged = time.monotonic(), -_LOG_SECONDS
        while not should_stop():
            ended = (
                self._run.is_finished()
            )  # read before looking for checkpoints, so that the last ones are seen
            path = self._next()
            if path is not None:
                yield path
                since, logged = time.monotonic(), -_LOG_SECONDS
                continue
            if ended:
                return
            now = time.monotonic()
            if self._run.is_alive():
                since = now
            elif self._timeout is not None and now - since >= self._timeout:
                raise NothingToWaitForError(
                    f"no new checkpoint for {now - since:.0f} s (trainer.continuous_eval_timeout)"
                    f" in {self._directory}: {self._describe_folder()}; {self._run.describe_trainer()}"
                )
            if now - logged >= _LOG_SECONDS:
                limit = "no time limit"
                if self._timeout is not None:
                    limit = f"at most {self._timeout:g} s without a sign of life"
                pattern = f"{self._directory}/ckpt-*.index"
                _LOG.info(
                    "waiting for %s (%s); %s; %s",
                    pattern,
                    self._describe_folder(),
                    self._run.describe_trainer(),
                    limit,
                )
                logged = now
            with enter_wait():
                time.sleep(_POLL_SECONDS)

    def _is_foreign(self, prefix: str) -> bool:
        """Whether another run saved the checkpoint; warns once."""
        if prefix not in self._foreign_prefixes and is_foreign(
            prefix, read_run_id(self._directory)
        ):
            _LOG.warning("%s was saved by another run; it is not evaluated", prefix)
            self._foreign_prefixes.add(prefix)
        return prefix in self._foreign_prefixes

    def _next(self) -> str | None:
        """Returns the prefix of the next checkpoint, which the run keeps from now on; None if there is none."""
        back = self._run.poll_rewind()
        if back is not None:
            self._handled_steps = {step for step in self._handled_steps if step <= back}
            self._queued_steps = {step for step in self._queued_steps if step <= back}
        known = self._run.get_evaluated_steps() | self._handled_steps
        last = max(known, default=-1)
        there = complete_checkpoints(self._directory)
        new = [
            step for step in there if step not in known and (step > last or not self._newest_only)
        ]
        new = [step for step in new if not self._is_foreign(there[step])]
        self._report_lost(self._queued_steps - set(there) - known)
        if self._newest_only:
            skipped = new[:-1]
            new = new[-1:]
            self._handled_steps |= set(skipped)
            self.unevaluated_count += len(skipped)
            if skipped:
                _LOG.info(
                    "skipped: %s; a newer checkpoint exists (trainer.continuous_eval.policy=latest;"
                    " %d skipped in all)",
                    ", ".join(f"ckpt-{step}" for step in skipped),
                    self.unevaluated_count,
                )
        self._queued_steps = set(new)
        for step in new:
            self._run.protect_checkpoints(None if self._newest_only else step - 1, step)
            self._handled_steps.add(step)
            if os.path.exists(f"{there[step]}.index"):
                return there[step]
            self._report_lost({step})
        self._run.protect_checkpoints(None if self._newest_only else last, None)
        return None

    def _report_lost(self, steps: set[int]) -> None:
        self._handled_steps |= steps
        self.unevaluated_count += len(steps)
        if steps:
            _LOG.warning(
                "%s: removed before evaluation (%d in all); the run keeps at most "
                "trainer.continuous_eval.max_wait_checkpoints checkpoints for evaluations",
                ", ".join(f"ckpt-{step}" for step in sorted(steps)),
                self.unevaluated_count,
            )

    def _describe_folder(self) -> str:
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
