"""Recognises errors that come from a lost worker, and asks for a restart.

TensorFlow 2.20 detects a worker that was killed, stopped or cut off at once if it was just talking
to it, else by its own heartbeats within 10 s, and one that was started again when that connects. It
then aborts all collective operations for good, with an error that reaches Python; it neither hangs
nor ends the process. All workers then have to be started again: a cluster takes no worker back.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.errors import InterruptedRunError, PreemptedError

_ERROR_TYPES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,  # the worker was started again
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_MESSAGE_PARTS = ("Collective ops is aborted by", "coordination service")
_TASK_PATTERN = re.compile(
    r"(?:reported from|remote target) /job:(\w+)(?:/replica:\d+)?/task:(\d+)"
)


def find_lost_worker(error: BaseException) -> str | None:
    """Returns the lost worker that an error comes from, such as "worker 1"; None for any other error. Pure."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, _ERROR_TYPES) and any(sign in one.message for sign in _MESSAGE_PARTS):
            found = _TASK_PATTERN.search(one.message)
            return f"{found[1]} {found[2]}" if found else "another worker"
        one = one.__cause__ or one.__context__
    return None


@contextlib.contextmanager
def convert_lost_worker_errors() -> Iterator[None]:
    """Turns an error that comes from a lost worker into one that asks for a restart.

    Raises:
      PreemptedError: instead of that error.
    """
    try:
        yield
    except (PreemptedError, InterruptedRunError):
        raise
    except Exception as error:
        who = find_lost_worker(error)
        if who is None:
            raise
        raise PreemptedError(
            f"{who} is gone, and the other workers cannot train without it; start all workers"
            " again: the same command resumes from the last checkpoint"
        ) from error
