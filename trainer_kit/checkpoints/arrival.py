"""Checkpoints as they come, for an evaluation beside the run that saves them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from trainer_kit.checkpoints.names import complete_checkpoints
from trainer_kit.errors import NothingToWaitForError

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5


def arrivals(
    directory: str,
    timeout: float | None,
    finished: Callable[[], bool],
    stopping: Callable[[], bool],
    waiting: Callable[[], AbstractContextManager[None]],
) -> Iterator[str]:
    """Yields the prefix of each checkpoint in `directory`, in the order of steps, those to come included.

    Args:
      directory: where they appear.
      timeout: seconds to wait for one; None: for ever.
      finished: tells whether no more will come; asked before each look, so that the last ones are seen.
      stopping: tells whether to end.
      waiting: entered while it waits.

    Raises:
      NothingToWaitForError: when none came in time although more were to come.
    """
    last, waiting_since, told = -1, time.monotonic(), False
    while not stopping():
        ended = finished()
        new = [(step, path) for step, path in complete_checkpoints(directory).items() if step > last]
        if new:
            last, path = new[0]
            yield path
            waiting_since, told = time.monotonic(), False
            continue
        if ended:
            return
        waited = time.monotonic() - waiting_since
        if timeout is not None and waited >= timeout:
            raise NothingToWaitForError(
                f"no checkpoint after step {last} appeared in {directory} for {waited:.0f} s "
                "(trainer.continuous_eval_timeout); is the training run still there?"
            )
        if not told:
            limit = "" if timeout is None else f", at most {timeout:.0f} s"
            _LOG.info("waiting for %s/ckpt-*.index after step %d%s", directory, last, limit)
            told = True
        with waiting():
            time.sleep(_POLL_SECONDS)
