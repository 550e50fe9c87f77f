"""The standard streams of commands; they outlast their readers: a run goes on when nobody reads its output any more."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import Any

_LOG = logging.getLogger(__name__)
_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe (`| head`) has ended, the terminal was closed


def outlast_readers() -> None:
    """From now on what is written to the standard output or error after its reader has gone is dropped.

    For commands that train: a `print` of a task would raise BrokenPipeError, and end the run as a bug of the task.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # somebody has replaced it, or it was closed
            continue
        stream.flush()
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        lasting = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # as Python itself does
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


class CurrentError:
    """sys.stderr as it is at each write: while the progress display draws, it has put itself in its place."""

    def write(self, text: str) -> int:
        """Writes to it."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flushes it."""
        sys.stderr.flush()


class _Lasting(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())  # for all that writes there, TensorFlow's own messages included
            os.close(nothing)
            if self.fileno() == 1:  # the log goes to the other one
                _LOG.warning("nobody reads the standard output any more; the run continues without it")
            return memoryview(data).nbytes
