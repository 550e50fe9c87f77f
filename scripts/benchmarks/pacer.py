"""The protocol by which a measuring process runs a measured one window by window, and receives its counts."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Seconds. Whatever a process does now and then, a heartbeat or a redraw, is overdue when it has stood still for longer
# than that lasts: it would all come in each window, which is too short to have earned it. Its caches are cold, too.
SETTLES_WITHIN = 0.3


class Pacer:
    """Runs a process window by window; the process waits in `done` while others have their turn.

    A loop that begins just after the process continued does not count, however long it is. The time of its end must
    not decide this: of two processes that are almost equally fast, only the slower one would count its first loop.

    Args:
      connection: The connection to the measuring process. That sends (seconds, settles_within): the length of the next
        window, and the time at its beginning in which loops that begin do not count; 0: all loops count. It receives
        the seconds from the start to the first `done`, then (count, seconds) of each window.
      clock: Returns monotonic seconds.
    """

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
        self._connection, self._clock = connection, clock
        self._begin, self._wanted, self._count, self._apart = clock(), 0.0, 0, 0.0
        self._started, self._went_on, self._loop_began, self._settles_within = False, 0.0, 0.0, 0.0

    def done(self, count: int) -> None:
        """Counts `count` more steps; at the end of a window, waits until the next one begins.

        Raises:
          EOFError: when the measuring process has ended.
        """
        now = self._clock()
        seconds = now - self._begin - self._apart
        self._count += count
        began, self._loop_began = self._loop_began, now
        if self._wanted and began - self._went_on < self._settles_within:
            self._count, self._apart, self._begin = 0, 0.0, now
            return
        if not self._started:
            self._started = True
            self._connection.send(seconds)
        elif seconds < self._wanted:
            return
        else:
            self._connection.send((self._count, seconds))
        self._wanted, self._settles_within = self._connection.recv()
        self._count, self._apart, self._begin = 0, 0.0, self._clock()
        self._went_on = self._loop_began = self._begin

    def leave_out(self, seconds: float) -> None:
        """Leaves `seconds` out of the current window."""
        self._apart += seconds
        self._went_on += seconds
        self._loop_began += seconds

    def tell(self, seconds: float) -> None:
        """Ends the window with one count that took `seconds`, whatever the window's length; then waits like `done`."""
        self._apart = self._clock() - self._begin - seconds
        self._wanted = 0.0
        self.done(1)


def run(connection: Connection, function: str, folder: str, options: dict[str, Any]) -> None:
    """Calls "module:function" with a Pacer, a folder and `options`; this is the main function of a measured process."""
    pacer = Pacer(connection)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(pacer, folder, **options)


if __name__ == "__main__":  # DESCRIPTOR FUNCTION FOLDER OPTIONS, the last as JSON
    run(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
