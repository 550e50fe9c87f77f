"""What a measured process tells the one that measures: it runs when it is told to, and how far it has come."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Seconds. Whatever a process does now and then, a heartbeat or a redraw, is overdue when it has stood still for longer
# than that lasts: it would all come in each window, which is too short to have earned it.
SETTLES_WITHIN = 0.15


class Pacer:
    """Lets a process run window by window. It stands still in `done` while others have their turn.

    Loops that end just after it went on do not count. (A loop that is longer than that counts, with what was overdue.)

    Args:
      connection: to the process that measures. It sends (seconds, settles_within): the length of the next window, and
        how long after its beginning a loop that ends does not count; it gets the seconds from the start to the first
        `done`, then (count, seconds) of each window.
      clock: seconds that only go up.
    """

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.perf_counter) -> None:
        self._connection, self._clock = connection, clock
        self._begin, self._wanted, self._count, self._apart = clock(), 0.0, 0, 0.0
        self._started, self._went_on, self._settles_within = False, 0.0, 0.0

    def done(self, count: int) -> None:
        """Notes that `count` more steps are done; at the end of a window, returns when the next one begins.

        Raises:
          EOFError: when nobody measures any more.
        """
        now = self._clock()
        seconds = now - self._begin - self._apart
        self._count += count
        if self._wanted and now - self._went_on < self._settles_within:
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
        self._went_on = self._begin

    def leave_out(self, seconds: float) -> None:
        """Has so many seconds of this window not count."""
        self._apart += seconds
        self._went_on += seconds

    def tell(self, seconds: float) -> None:
        """Ends the window with something that took `seconds`, however long the window was; then as `done`."""
        self._apart = self._clock() - self._begin - seconds
        self._wanted = 0.0
        self.done(1)


def run(connection: Connection, function: str, folder: str, options: dict[str, Any]) -> None:
    """In a process of its own: calls "module:function" with a Pacer, a folder and `options`."""
    pacer = Pacer(connection)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(pacer, folder, **options)


if __name__ == "__main__":  # DESCRIPTOR FUNCTION FOLDER OPTIONS, the last as JSON
    run(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
