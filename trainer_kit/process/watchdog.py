"""Ends a process that makes no progress, so that it can be started again.

A stalled thread usually waits in C++ without Python's global lock (for a data source, a collective,
a file system). Another thread notices it, writes the stacks of all threads and ends the process
with exit code 7. A stall that holds the global lock stops that thread too. The last resort is a
timer of faulthandler, which needs no lock: half a minute later it prints the stacks to the standard
error and ends the process, with exit code 1, the only one that faulthandler has.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from trainer_kit import files
from trainer_kit.errors import ExitCode

_LOG = logging.getLogger(__name__)

# The descriptor: sys.stderr may be in the hands of a progress display, or of the stalled thread.
_STANDARD_ERROR = 2

# For each action at the end: the disk or the terminal may be what has stalled.
_ACTION_TIMEOUT_SECONDS = 3.0

# A longer time between two checks does not count, since the process was stopped meanwhile.
_MAX_COUNTED_POLLS = 5

# Where faulthandler's timer goes by the time of day, a suspended machine or a corrected clock would
# end a sound run.
_TIMER_IS_STEADY = bool(sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT"))


def call_within(seconds: float, act: Callable[[], object]) -> bool:
    """Calls `act` in a daemon thread.

    An error is logged. A call that takes longer than `seconds` continues in its thread.

    Returns:
      Whether `act` returned within `seconds`, without an error.
    """
    succeeded = threading.Event()

    def call() -> None:
        try:
            act()
            succeeded.set()
        except BaseException as error:
            _LOG.error("%r", error)

    thread = threading.Thread(target=call, name="bounded call", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # No more threads: the caller, which may be about to end the process, continues.
        return False
    thread.join(seconds)
    return succeeded.is_set()


class ProgressReader:
    """Calls `progress` again and again in a daemon thread, and keeps its last result.

    So `progress` may be slow or hang without blocking the readers of `latest`. Its first error is
    logged, and errors leave `latest` unchanged.

    Args:
      progress: Returns (phase, token), e.g. ("train", 120). Called in the thread.
      seconds: The seconds between two calls.

    Attributes:
      latest: The newest result, ("start", 0) before the first one.
      changes: How often the result has changed.
    """

    def __init__(self, progress: Callable[[], tuple[str, object]], seconds: float) -> None:
        self.latest: tuple[str, object] = ("start", 0)
        self.changes = 0
        self._progress = progress
        self._seconds = seconds
        self._has_failed = False
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._read_until_stopped, name="progress reader", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Waits at most a second for a call that hangs."""
        self._stop_event.set()
        self._thread.join(1)

    def read(self) -> None:
        """Calls `progress` now, in the thread of the caller."""
        try:
            phase, token = self._progress()
            result = (phase, token)
            if result != self.latest:
                self.latest = result
                self.changes += 1
        except BaseException as error:
            # SystemExit too: the thread has to live.
            if not self._has_failed:
                _LOG.warning("the progress of the run cannot be read: %r", error)
            self._has_failed = True

    def _read_until_stopped(self) -> None:
        while not self._stop_event.is_set():
            self.read()
            self._stop_event.wait(self._seconds)


class Watchdog:
    """While entered, ends the process when there is no progress for `timeout_seconds`.

    The time in which the machine is suspended, or the process stopped (Ctrl-Z), does not count. The
    last resort cannot notice a stopped process: if the process was stopped for longer than the
    timeout plus `last_resort_seconds`, the last resort ends it when it continues. It is
    faulthandler's only timer (`dump_traceback_later`), so a process can have one watchdog at a
    time. It is left out if that timer uses the time of day. A forked child has no watchdog.

    Args:
      progress: Returns (phase, token); each change of the pair is progress. Called in a separate
        thread: if it is slow or raises, there is no progress, and nothing else breaks.
      folder: The folder for the stacks, a file stacks-<UTC time>.txt.
      timeout_seconds: The longest time without progress. None means that there is only a warning.
      warn_after_seconds: The seconds without progress until the warning, which comes once per
        stall.
      poll_seconds: The seconds between two checks.
      exit: Ends the process with the given code at once, without a clean-up that could stall as
        well.
      last_resort_seconds: The seconds after the timeout until the last resort ends a process whose
        threads cannot run.
    """

    def __init__(
        self,
        progress: Callable[[], tuple[str, object]],
        folder: str | os.PathLike[str],
        timeout_seconds: float | None,
        warn_after_seconds: float = 30.0,
        poll_seconds: float = 1.0,
        exit: Callable[[int], None] = os._exit,
        last_resort_seconds: float = 30.0,
    ) -> None:
        self._folder = Path(folder)
        self._timeout = timeout_seconds
        self._warn_after = warn_after_seconds
        self._poll = poll_seconds
        self._exit = exit
        self._last_resort = last_resort_seconds
        self._stop_event = threading.Event()
        self._reader = ProgressReader(progress, poll_seconds)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._reader.start()
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_event.set()
        # The thread ends before the timer is cancelled: it could set the timer again.
        self._thread.join()
        _TIMER.cancel()
        self._reader.stop()

    def _watch(self) -> None:
        idle_seconds = 0.0
        last_check = time.monotonic()
        change_count = 0
        has_warned = False

        while not self._stop_event.wait(self._poll):
            self._arm()
            now = time.monotonic()
            idle_seconds += min(now - last_check, _MAX_COUNTED_POLLS * self._poll)
            last_check = now

            if change_count != self._reader.changes:
                if has_warned:
                    self._log_warning(
                        f"progress again after {idle_seconds:.0f} s in {self._describe_phase()}"
                    )
                idle_seconds = 0.0
                change_count = self._reader.changes
                has_warned = False
            elif self._timeout is not None and idle_seconds >= self._timeout:
                self._end(idle_seconds)
                return
            elif not has_warned and idle_seconds >= self._warn_after:
                has_warned = True
                prospect = (
                    "the process is never ended for it (trainer.hang_timeout_seconds is null)"
                )
                if self._timeout is not None:
                    code = f"exit code {ExitCode.STALLED:d}"
                    prospect = (
                        f"the process ends with {code} after {self._timeout:g} s"
                        " (trainer.hang_timeout_seconds)"
                    )
                self._log_warning(
                    f"no progress for {self._warn_after:g} s in {self._describe_phase()};"
                    f" {prospect}"
                )

    def _describe_phase(self) -> str:
        phase, token = self._reader.latest
        return f"phase {phase!r} (step {token})"

    def _log_warning(self, text: str) -> None:
        # The stalled thread may hold the lock of the log.
        call_within(_ACTION_TIMEOUT_SECONDS, lambda: _LOG.warning("%s", text))

    def _arm(self) -> None:
        if self._timeout is not None and _TIMER_IS_STEADY:
            _TIMER.set(self._timeout + self._last_resort)

    def _end(self, idle: float) -> None:
        try:
            problem = f"no progress for {idle:.0f} s in {self._describe_phase()}"
            path = self._folder / f"stacks-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.txt"
            stacks = _stacks()
            is_written = call_within(
                _ACTION_TIMEOUT_SECONDS,
                lambda: files.write_text(path, f"{problem}\n\n{stacks}", point="stacks"),
            )
            place = f"are in {path}" if is_written else f"cannot be written to {path}:\n{stacks}"
            message = (
                f"error: {problem}; the process ends with exit code {ExitCode.STALLED:d}"
                f" (trainer.hang_timeout_seconds is {self._timeout:g}); the stacks of all threads"
                f" {place}\n"
            )
            call_within(
                _ACTION_TIMEOUT_SECONDS, lambda: os.write(_STANDARD_ERROR, message.encode())
            )
        finally:
            self._exit(ExitCode.STALLED)


def _stacks() -> str:
    names = "\n".join(
        f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate()
    )
    try:
        with tempfile.TemporaryFile() as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            return f"{names}\n\n{stream.read().decode(errors='replace')}"
    except OSError as error:
        return f"{names}\n\nthe stacks cannot be taken: {error}\n"


class _Timer:
    """The timer of faulthandler, which a forked child must not inherit.

    The child would wait permanently when it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        unlock = self._lock.release
        os.register_at_fork(before=self._before_fork, after_in_parent=unlock, after_in_child=unlock)

    def set(self, seconds: float) -> None:
        """Ends the process after so many seconds, unless it is set again or cancelled before."""
        # A RuntimeError means no more threads: the run continues without a last resort.
        with self._lock, contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)
            self._is_set = True

    def cancel(self) -> None:
        """Cancels the timer if this object has set it. A timer that others have set stays."""
        with self._lock:
            self._cancel()

    def _cancel(self) -> None:
        if self._is_set:
            faulthandler.cancel_dump_traceback_later()
            self._is_set = False

    def _before_fork(self) -> None:
        self._lock.acquire()
        self._cancel()


_TIMER = _Timer()
