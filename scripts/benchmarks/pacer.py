"""What a measured process tells the one that measures: it runs when it is told to, and how far it has come."""

from __future__ import annotations

import importlib
import json
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

# Seconds. Whatever a process does now and then, a heartbeat or a redraw, is overdue when it has stood still for longer
# than that lasts: it would all come in each window, which is too short to have earned it.
SETTLES_WITHIN = 0.15


class Pacer:
    """Lets a process run window by window. It stands still in `done` while others have their turn.

    Loops that end just after it went on do not count.

    Args:
      connection: to the process that measures. It sends the length of the next window in seconds; it gets the seconds
        from the start to the first `done`, then (count, seconds) of each window.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begin, self._wanted, self._count, self._apart = time.perf_counter(), 0.0, 0, 0.0
        self._started, self._went_on = False, 0.0

    def done(self, count: int) -> None:
        """Notes that `count` more steps are done; at the end of a window, returns when the next one begins.

        Raises:
          EOFError: when nobody measures any more.
        """
        now = time.perf_counter()
        seconds = now - self._begin - self._apart
        self._count += count
        if self._wanted and now - self._went_on < SETTLES_WITHIN:
            self._count, self._apart, self._begin = 0, 0.0, now
            return
        if not self._started:
            self._started = True
            self._connection.send(seconds)
        elif seconds < self._wanted:
            return
        else:
            self._connection.send((self._count, seconds))
        self._wanted = self._connection.recv()
        self._count, self._apart, self._begin = 0, 0.0, time.perf_counter()
        self._went_on = self._begin

    def leave_out(self, seconds: float) -> None:
        """Has so many seconds of this window not count."""
        self._apart += seconds

    def tell(self, seconds: float) -> None:
        """Ends the window with something that took `seconds`, however long the window was; then as `done`."""
        self._apart = time.perf_counter() - self._begin - seconds
        self._wanted = 0.0
        self.done(1)


def run(connection: Connection, function: str, folder: str, options: dict[str, Any]) -> None:
    """In a process of its own: calls "module:function" with a Pacer, a folder and `options`."""
    pacer = Pacer(connection)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(pacer, folder, **options)


if __name__ == "__main__":  # DESCRIPTOR FUNCTION FOLDER OPTIONS, the last as JSON
    run(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
