"""Standard streams of commands that outlast their readers: a run continues when nobody reads its output any more."""

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
    """From now on drops text that is written to the standard output or error after its reader is gone.

    For commands that train: otherwise a `print` of a task would raise BrokenPipeError and end the run as a bug.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # somebody has replaced it, or it was closed
            continue
        stream.flush()
        raw = _PersistentFile(stream.fileno(), "w", closefd=False)
        persistent = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # as Python itself does
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, persistent)


class CurrentError:
    """A stream that writes to the current sys.stderr, which the progress display replaces while it draws."""

    def write(self, text: str) -> int:
        """Writes to sys.stderr."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flushes sys.stderr."""
        sys.stderr.flush()


class _PersistentFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())  # for all writers, TensorFlow's C++ messages included
            os.close(nothing)
            if self.fileno() == 1:  # the log goes to the standard error
                _LOG.warning("nobody reads the standard output any more; the run continues without it")
            return memoryview(data).nbytes
