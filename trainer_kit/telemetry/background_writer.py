"""Writes reports in a separate thread, so that the training loop only hands them over."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from trainer_kit.telemetry.report import Report, Writer

_LOG = logging.getLogger(__name__)


class BackgroundWriter:
    """Passes reports to `writers`, in order, in one daemon thread.

    By default a report is written within a fifth of a second.

    A writer that fails loses only the report it failed on. It and the other writers continue with
    the next report. The next call of `write`, `flush` or `close` raises the first error, unchanged
    and once. Further errors until then are logged.

    Args:
      writers: The writers that get every report. They are called only in the thread, `close`
        included, except those with a true attribute `needs_caller_thread`: `write`, `flush` and
        `close` call these directly.
      capacity: The number of reports that may wait. When the queue is full, `write` waits, so no
        report is dropped.
      batching_seconds: The seconds that a report waits for others, unless the queue is half full.
        Waking the thread for each report would cost 4 % of a loop of 20 ms.
    """

    def __init__(
        self, writers: Sequence[Writer], capacity: int = 256, batching_seconds: float = 0.2
    ) -> None:
        self._direct_writers = tuple(
            writer for writer in writers if getattr(writer, "needs_caller_thread", False)
        )
        self._threaded_writers = tuple(
            writer for writer in writers if writer not in self._direct_writers
        )
        self._queue: queue.Queue[Report | _Request] = queue.Queue(maxsize=capacity)
        self._batching_seconds = batching_seconds
        # Set while something waits for the thread.
        self._wake_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._is_closed = False
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()

    def write(self, report: Report) -> None:
        """Queues `report` and returns, usually within microseconds.

        The report is queued even if this raises an error.

        Raises:
          RuntimeError: after `close`.
          Exception: the first error of a writer since the last call.
        """
        self._enqueue(report)
        for writer in self._direct_writers:
            self._guard(writer.write, report)
        self._raise_error()

    def flush(self) -> None:
        """Waits until all writers have written and flushed every queued report.

        Raises:
          RuntimeError: after `close`.
          Exception: the first error of a writer since the last call.
        """
        self._run_on_writers(lambda writer: writer.flush())
        self._raise_error()

    def flush_threaded_writers(self) -> None:
        """Waits like `flush`, in any thread.

        The next call of another method raises errors of writers.

        Writers with a true `needs_caller_thread` are left out. Returns at once after `close`.
        """
        if not self._is_closed:
            self._run_on_writers(lambda writer: writer.flush(), threaded_only=True)

    def close(self) -> None:
        """Writes all waiting reports, closes all writers and ends the thread.

        A second call does nothing.

        Raises:
          Exception: the first error of a writer since the last call or in its `close`, after all
            were closed.
        """
        if not self._is_closed:
            self._run_on_writers(lambda writer: writer.close(), is_last=True)
            self._is_closed = True
            if self._thread is not None:
                self._thread.join()
        self._raise_error()

    def _enqueue(self, item: Report | _Request) -> None:
        if self._is_closed:
            raise RuntimeError("this BackgroundWriter is closed; write before close()")
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_until_closed, name="trainer_kit telemetry", daemon=True
                )
                self._thread.start()
        self._queue.put(item)
        half = self._queue.maxsize // 2
        if isinstance(item, _Request) or self._queue.qsize() >= half:
            self._wake_event.set()

    def _run_on_writers(
        self,
        action: Callable[[Writer], None],
        *,
        is_last: bool = False,
        threaded_only: bool = False,
    ) -> None:
        request = _Request(action, is_last)
        self._enqueue(request)
        if not threaded_only:
            for writer in self._direct_writers:
                self._guard(action, writer)

        # Ctrl-C in an earlier close() may have left a thread that has ended since.
        while not request.done.wait(0.5) and self._thread is not None and self._thread.is_alive():
            pass

    def _raise_error(self) -> None:
        if self._error is None:
            return
        with self._error_lock:
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def _write_until_closed(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, Report):
                # More reports may follow soon. The thread then wakes once for all of them.
                if self._queue.empty():
                    self._wake_event.wait(self._batching_seconds)
                    self._wake_event.clear()
                for writer in self._threaded_writers:
                    self._guard(writer.write, item)
                continue

            for writer in self._threaded_writers:
                self._guard(item.action, writer)
            item.done.set()
            if item.is_last:
                return

    def _guard(self, call: Callable[..., None], *arguments: object) -> None:
        # BaseException includes SystemExit. If this thread ended here, the training loop would wait
        # permanently.
        try:
            call(*arguments)
        except BaseException as error:
            with self._error_lock:
                first_error = self._error
                self._error = first_error or error
            # All writers of a lost folder raise the same error, which is not logged again.
            if first_error is not None and str(first_error) != str(error):
                _LOG.error("another error occurred while reports were written: %r", error)


class _Request:
    """An action that every writer carries out after all earlier reports were written."""

    def __init__(self, action: Callable[[Writer], None], is_last: bool) -> None:
        self.action = action
        self.is_last = is_last
        self.done = threading.Event()
