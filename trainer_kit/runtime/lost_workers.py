"""Recognises errors that come from a lost worker, and asks for a restart.

TensorFlow 2.20 detects a worker that was killed, stopped or cut off. It does so at once if it was
just talking to the worker, else by its own heartbeats within 10 s. It detects a worker that was
started again when that worker connects. It then aborts all collective operations permanently, with
an error that reaches Python. It neither hangs nor ends the process. All workers then have to be
started again: a cluster takes no worker back.
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
    """Returns the lost worker that an error comes from, such as "worker 1".

    None for any other error. Pure.
    """
    # A chain of causes may contain a cycle.
    visited_ids: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited_ids:
        visited_ids.add(id(cause))
        if isinstance(cause, _ERROR_TYPES):
            message = cause.message
            if any(part in message for part in _MESSAGE_PARTS):
                match = _TASK_PATTERN.search(message)
                return f"{match[1]} {match[2]}" if match else "another worker"
        cause = cause.__cause__ or cause.__context__
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
        worker = find_lost_worker(error)
        if worker is None:
            raise
        raise PreemptedError(
            f"{worker} is gone, and the other workers cannot train without it;"
            " start all workers again: the same command resumes from the last checkpoint"
        ) from error
