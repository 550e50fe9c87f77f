"""Writes reports in a thread of its own, so that the training loop pays for a hand-over only."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from trainer_kit.telemetry.report import Report, Writer

_LOG = logging.getLogger(__name__)


class BackgroundWriter:
    """Hands reports to `writers`, in order, in one daemon thread, a fifth of a second after they came at the latest.

    An error of a writer costs that writer the report it failed on; the other writers go on, and so does the writer
    itself with the next report. The first error is raised as it is, once, by the next call of `write`, `flush` or
    `close`; errors that come while one is waiting to be raised are logged.

    Args:
      writers: each gets every report. They are used in the thread only, `close` included, but for those with a true
        attribute `in_caller_thread`: these are called at once by `write`, `flush` and `close`.
      capacity: reports that may wait. When as many do, `write` waits: none is ever dropped.
      together: seconds that a report waits for others, unless half as many wait as may: to wake the thread for each
        one costs a loop of 20 ms 4 %.
    """

    def __init__(self, writers: Sequence[Writer], capacity: int = 256, together: float = 0.2) -> None:
        self._at_once = tuple(writer for writer in writers if getattr(writer, "in_caller_thread", False))
        self._writers = tuple(writer for writer in writers if writer not in self._at_once)
        self._queue: queue.Queue[Report | _Request] = queue.Queue(maxsize=capacity)
        self._together = together
        self._hurry = threading.Event()  # something waits for the thread
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()

    def write(self, report: Report) -> None:
        """Hands `report` over and returns, as a rule within microseconds. The report is kept even if this raises.

        Raises:
          RuntimeError: after `close`.
          Exception: what a writer raised since the last call.
        """
        self._put(report)
        for writer in self._at_once:
            self._guard(writer.write, report)
        self._raise_error()

    def flush(self) -> None:
        """Waits until every report handed over has been written and flushed by all writers.

        Raises:
          RuntimeError: after `close`.
          Exception: what a writer raised since the last call.
        """
        self._ask(lambda writer: writer.flush())
        self._raise_error()

    def settle(self) -> None:
        """Waits as `flush` does, in any thread; what a writer raises is for the next call of another method.

        Leaves out those with a true `in_caller_thread`. Returns at once after `close`.
        """
        if not self._closed:
            self._ask(lambda writer: writer.flush(), in_thread_only=True)

    def close(self) -> None:
        """Writes what waits, closes all writers and ends the thread; a second call does nothing.

        Raises:
          Exception: what a writer raised since the last call, or in its own `close`, when all have been closed.
        """
        if not self._closed:
            self._ask(lambda writer: writer.close(), last=True)
            self._closed = True
            if self._thread is not None:
                self._thread.join()
        self._raise_error()

    def _put(self, item: Report | _Request) -> None:
        if self._closed:
            raise RuntimeError("this BackgroundWriter is closed; write before close()")
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="trainer_kit telemetry", daemon=True)
                self._thread.start()
        self._queue.put(item)
        if isinstance(item, _Request) or self._queue.qsize() >= self._queue.maxsize // 2:
            self._hurry.set()

    def _ask(self, action: Callable[[Writer], None], *, last: bool = False, in_thread_only: bool = False) -> None:
        request = _Request(action, last)
        self._put(request)
        for writer in () if in_thread_only else self._at_once:
            self._guard(action, writer)
        # Ctrl-C in an earlier close() may have left a thread that came to its end since.
        while not request.done.wait(0.5) and self._thread is not None and self._thread.is_alive():
            pass

    def _raise_error(self) -> None:
        if self._error is not None:
            with self._error_lock:
                error, self._error = self._error, None
            if error is not None:
                raise error

    def _serve(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, Report):
                if self._queue.empty():
                    self._hurry.wait(self._together)
                    self._hurry.clear()
                for writer in self._writers:
                    self._guard(writer.write, item)
                continue
            for writer in self._writers:
                self._guard(item.action, writer)
            item.done.set()
            if item.last:
                return

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        # SystemExit and the like too: a thread that ended here would leave the training loop waiting for ever.
        try:
            call(*arguments)
        except BaseException as error:
            with self._error_lock:
                waiting = self._error
                self._error = waiting or error
            if waiting is not None and str(waiting) != str(error):  # each writer of a lost folder says the same
                _LOG.error("a further error while reports were written: %r", error)


class _Request:
    """Something to be done by every writer when all reports before it have been written."""

    def __init__(self, action: Callable[[Writer], None], last: bool) -> None:
        self.action = action
        self.last = last
        self.done = threading.Event()
