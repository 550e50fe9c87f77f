"""The protocol by which a measuring process runs a measured process window by window."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

# Seconds. After a standstill, caches are cold and everything periodic is overdue, such as a
# heartbeat or a redraw. Loops that begin within this time do not count.
SETTLES_WITHIN = 0.3


class Pacer:
    """Runs a process window by window.

    The process waits in `report_steps` while others have their turn.

    Whether a loop counts depends on its beginning only. If its end decided, then of two processes
    that are almost equally fast only the slower one would count its first loop.

    Args:
      connection: The connection to the measuring process. It receives "ready", then the
        (count, seconds) of each window. It sends the least length of the next window in seconds;
        0: the window ends after one loop, which counts.
      skip: The number of steps before the process is ready.
      clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        connection: Connection,
        skip: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = connection
        self._skip = skip
        self._clock = clock
        self._is_ready = False
        self._length = 0.0
        self._count = 0
        self._resumed = 0.0
        self._loop_began = 0.0
        self._window_began = 0.0

    def report_steps(self, count: int) -> None:
        """Counts `count` more steps; at the end of a window, waits until the next one begins.

        Raises:
          EOFError: when the measuring process has ended.
        """
        now = self._clock()

        if not self._is_ready:
            self._skip -= count
            if self._skip <= 0:
                self._end_window("ready")
            return

        settles = self._length > 0 and self._loop_began - self._resumed < SETTLES_WITHIN
        self._loop_began = now
        if settles:
            self._window_began = now
            return

        self._count += count
        seconds = now - self._window_began
        if seconds >= self._length:
            self._end_window((self._count, seconds))

    def report_figure(self, figure: float) -> None:
        """Ends the window with one count of `figure`, in seconds or another unit; then waits."""
        self._end_window((1, figure) if self._is_ready else "ready")

    def _end_window(self, message: Any) -> None:
        self._connection.send(message)
        self._is_ready = True
        self._length = self._connection.recv()

        self._count = 0
        self._resumed = self._loop_began = self._window_began = self._clock()


def run(
    connection: Connection, function: str, folder: str, options: Mapping[str, Any], skip: int
) -> None:
    """Calls "module:function" with a Pacer, a folder and `options`, in the measured process."""
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(Pacer(connection, skip), folder, **options)
