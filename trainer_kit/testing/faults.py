"""Causes faults at named moments of a run's writes: the process is killed, or the disk is full.

trainer_kit.files reports these names just before each step of a write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from typing import Literal

from trainer_kit import files
from trainer_kit.errors import UsageError, suggest_names

# The steps of a file that is replaced as a whole.
_REPLACE_STEPS = (".open", ".flush", ".rename")

# Every write point of a local run of train_and_eval that keeps the best, rotates, is killed,
# resumes and ends.
WRITE_POINTS: tuple[str, ...] = (
    *(
        name + step
        for name in ("heartbeat", "params", "manifest", "file")
        for step in _REPLACE_STEPS
    ),
    "checkpoint.begin",
    "checkpoint.save",
    "checkpoint.written",
    *("checkpoint.record" + step for step in _REPLACE_STEPS),
    "checkpoint.move",
    "checkpoint.pointer",
    *("checkpoint.pointer_file" + step for step in _REPLACE_STEPS),
    "checkpoint.remove",
    "best.weights",
    *("best.record" + step for step in _REPLACE_STEPS),
    *("best.info" + step for step in _REPLACE_STEPS),
    *("best.pointer" + step for step in _REPLACE_STEPS),
    "ledger.append",
    "history.supersede",
    *("history" + step for step in _REPLACE_STEPS),
    *("final" + step for step in _REPLACE_STEPS),
)


def stop_at(point: str, occurrence: int = 1, how: Literal["kill", "raise"] = "kill") -> None:
    """Makes this process fail when the write point `point` is reached, in any thread.

    A second call replaces the first. For a run started from the command line, call it in a module
    that --import_module names.

    Args:
      point: One of WRITE_POINTS.
      occurrence: At which occurrence of the point the process fails, counted from 1.
      how: "kill" ends the process by SIGKILL, as a power cut or the kernel does. "raise" raises the
        OSError of a full disk, once.

    Raises:
      UsageError: for an unknown point, or an occurrence below 1.
    """
    if point not in WRITE_POINTS:
        raise UsageError(f"there is no write point {point!r}; {suggest_names(point, WRITE_POINTS)}")
    if occurrence < 1:
        raise UsageError(f"occurrence is {occurrence}; use 1 or more")

    lock = threading.Lock()
    count = 0

    def fail_if_due(name: str, path: str) -> None:
        nonlocal count
        if name != point:
            return
        with lock:
            count += 1
            is_due = count == occurrence
        if is_due and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    files.on_write_point = fail_if_due


@contextlib.contextmanager
def record_points(file: str | os.PathLike[str] | None = None) -> Iterator[list[str]]:
    """Yields a list of the write points that this process reaches, in order, in all its threads.

    A fault that `stop_at` has set before still happens.

    Args:
      file: A file to which each point is appended at once, one per line: for a process that is
        killed.
    """
    points: list[str] = []
    previous_hook = files.on_write_point

    def record_point(point: str, path: str) -> None:
        points.append(point)
        if file is not None:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"{point}\n")
        if previous_hook is not None:
            previous_hook(point, path)

    files.on_write_point = record_point
    try:
        yield points
    finally:
        files.on_write_point = previous_hook
