"""Watches a folder for new checkpoints, for an evaluation outside the process that saves them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import is_foreign
from trainer_kit.errors import NothingToWaitForError
from trainer_kit.process.run_directory import read_run_id

if TYPE_CHECKING:
    # It imports TensorFlow, which this module does not need.
    from trainer_kit.evals.continuous_eval import Sidecar

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.25
_LOG_SECONDS = 300.0


class CheckpointWatcher:
    """Yields each checkpoint of a folder once, including those that are saved later.

    Args:
      directory: The folder of the checkpoints.
      timeout: The seconds to wait for a checkpoint without a sign of life of the run. None waits
        without limit.
      sidecar: The sidecar of the run that saves the checkpoints.
      newest_only: Whether to skip all but the newest checkpoint. Otherwise all come in the order of
        steps.
    """

    def __init__(
        self, directory: str, timeout: float | None, sidecar: Sidecar, newest_only: bool = False
    ) -> None:
        self._directory = directory
        self._timeout = timeout
        self._sidecar = sidecar
        self._newest_only = newest_only
        # Steps that were yielded, skipped or lost
        self._handled_steps: set[int] = set()
        # Steps that were seen and still have to be yielded
        self._queued_steps: set[int] = set()
        # Prefixes of checkpoints that another run saved
        self._foreign_prefixes: set[str] = set()
        # How many checkpoints were skipped or lost
        self._unevaluated_count = 0

    def follow(
        self,
        should_stop: Callable[[], bool],
        enter_wait: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[str]:
        """Yields the prefix of each checkpoint until the run is finished.

        Args:
          should_stop: Returns whether to end.
          enter_wait: Returns a context manager that is entered while waiting.

        Raises:
          NothingToWaitForError: when no checkpoint came in time although the run is not finished.
        """
        last_sign = time.monotonic()
        last_log = -_LOG_SECONDS
        while not should_stop():
            # Read before looking for checkpoints, so that the last ones are seen.
            is_finished = self._sidecar.is_finished()
            path = self._next()
            if path is not None:
                yield path
                last_sign = time.monotonic()
                last_log = -_LOG_SECONDS
                continue
            if is_finished:
                return

            now = time.monotonic()
            if self._sidecar.is_alive():
                last_sign = now
            elif self._timeout is not None and now - last_sign >= self._timeout:
                raise NothingToWaitForError(
                    f"no new checkpoint for {now - last_sign:.0f} s "
                    "(trainer.continuous_eval_timeout) "
                    f"in {self._directory}: {self._describe_folder()}; "
                    f"{self._sidecar.describe_trainer()}"
                )

            if now - last_log >= _LOG_SECONDS:
                _LOG.info(
                    "waiting for a checkpoint in %s: %s; %s",
                    self._directory,
                    self._describe_folder(),
                    self._sidecar.describe_trainer(),
                )
                last_log = now
            with enter_wait():
                time.sleep(_POLL_SECONDS)

    def _is_foreign(self, prefix: str) -> bool:
        """Whether another run saved the checkpoint. Warns once."""
        if prefix in self._foreign_prefixes:
            return True
        if not is_foreign(prefix, read_run_id(self._directory)):
            return False
        _LOG.warning("%s was saved by another run; it is not evaluated", prefix)
        self._foreign_prefixes.add(prefix)
        return True

    def _next(self) -> str | None:
        """Returns the prefix of the next checkpoint, or None if there is none.

        The run keeps that checkpoint from now on.
        """
        rewind_step = self._sidecar.poll_rewind()
        if rewind_step is not None:
            self._handled_steps = {step for step in self._handled_steps if step <= rewind_step}
            self._queued_steps = {step for step in self._queued_steps if step <= rewind_step}

        done_steps = self._sidecar.get_evaluated_steps() | self._handled_steps
        last_step = max(done_steps, default=-1)
        checkpoints = complete_checkpoints(self._directory)
        steps = [
            step
            for step in checkpoints
            if step not in done_steps and (step > last_step or not self._newest_only)
        ]
        steps = [step for step in steps if not self._is_foreign(checkpoints[step])]
        self._report_lost(self._queued_steps - set(checkpoints) - done_steps)

        if self._newest_only:
            skipped_steps = steps[:-1]
            steps = steps[-1:]
            self._handled_steps |= set(skipped_steps)
            self._unevaluated_count += len(skipped_steps)
            if skipped_steps:
                _LOG.info(
                    "skipped: %s; a newer checkpoint exists "
                    "(trainer.continuous_eval.policy=latest; %d skipped in all)",
                    ", ".join(f"ckpt-{step}" for step in skipped_steps),
                    self._unevaluated_count,
                )

        self._queued_steps = set(steps)
        for step in steps:
            self._sidecar.protect_checkpoints(None if self._newest_only else step - 1, step)
            self._handled_steps.add(step)
            # The run may have removed the checkpoint before it was protected.
            if os.path.exists(f"{checkpoints[step]}.index"):
                return checkpoints[step]
            self._report_lost({step})
        self._sidecar.protect_checkpoints(None if self._newest_only else last_step, None)
        return None

    def _report_lost(self, steps: set[int]) -> None:
        self._handled_steps |= steps
        self._unevaluated_count += len(steps)
        if steps:
            _LOG.warning(
                "%s: removed before evaluation (%d in all); the run keeps at most "
                "trainer.continuous_eval.max_wait_checkpoints checkpoints for evaluations",
                ", ".join(f"ckpt-{step}" for step in sorted(steps)),
                self._unevaluated_count,
            )

    def _describe_folder(self) -> str:
        """Describes the contents of the folder, for messages."""
        if not os.path.isdir(self._directory):
            return "the folder does not exist"
        steps = list(complete_checkpoints(self._directory))
        if steps:
            return f"ckpt-{steps[-1]} is the newest, and was handled"

        names: list[str] = []
        # The folder may be moved in between. The evaluation itself creates evals/.
        with contextlib.suppress(FileNotFoundError):
            names = sorted(set(os.listdir(self._directory)) - {"evals"})
        if not names:
            return "the folder is empty"
        return f"the folder holds no checkpoint, only {', '.join(names[:5])}"
