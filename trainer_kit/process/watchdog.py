"""Ends a process that makes no progress, so that whoever started it can start it again.

A stall as a rule waits in C++ without Python's global lock (a data source, a collective, a file system): a thread
sees it, writes the stacks of all threads and ends the process with exit code 7. A stall that keeps the global lock
stops that thread too. For this there is a last resort, a timer of faulthandler, which needs no lock: half a minute
later it prints the stacks to the standard error and ends the process, with exit code 1, since faulthandler knows no
other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from trainer_kit import files
from trainer_kit.errors import ExitCode

_LOG = logging.getLogger(__name__)
_STANDARD_ERROR = 2  # the descriptor: sys.stderr may be in the hands of a progress display, or of the stalled thread
_PATIENCE = 3.0  # seconds that each thing done at the end may take: what has stalled may be the disk or the terminal
_LONGEST_POLL = 5  # polls; what two looks lie apart beyond that does not count: the process was stopped meanwhile

# Where faulthandler's timer goes by the time of day, a suspended machine or a corrected clock would end a sound run.
_TIMER_IS_STEADY = sys.version_info >= (3, 11) and bool(sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT"))


def call_within(seconds: float, act: Callable[[], object]) -> bool:
    """Calls `act` in a daemon thread; returns whether it came back within `seconds`, without an error.

    An error is logged. What takes longer goes on in its thread.
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
    except RuntimeError:  # no more threads: the caller, who may be about to end the process, goes on
        return False
    thread.join(seconds)
    return succeeded.is_set()


class ProgressReader:
    """Asks `progress` again and again in a daemon thread of its own, and keeps what it said last.

    So `progress` may be slow or hang without holding up whoever reads `latest`. Its first error is logged; an error
    changes nothing.

    Args:
      progress: returns (phase, token), e.g. ("train", 120); called in the thread.
      seconds: between two calls.

    Attributes:
      latest: the newest answer; ("start", 0) before the first one.
      changes: how often the answer was another one than before.
    """

    def __init__(self, progress: Callable[[], tuple[str, object]], seconds: float) -> None:
        self.latest: tuple[str, object] = ("start", 0)
        self.changes = 0
        self._progress = progress
        self._seconds = seconds
        self._failed = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="progress reader", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Asks no more; a call that hangs is left to itself after a second."""
        self._left.set()
        self._thread.join(1)

    def read(self) -> None:
        """Asks now, in the thread of the caller."""
        try:
            phase, token = self._progress()
            answer = (phase, token)
            if answer != self.latest:
                self.latest = answer
                self.changes += 1
        except BaseException as error:  # SystemExit too: the thread has to live
            if not self._failed:
                _LOG.warning("the progress of the run cannot be read: %r", error)
            self._failed = True

    def _serve(self) -> None:
        while not self._left.is_set():
            self.read()
            self._left.wait(self._seconds)


class Watchdog:
    """While entered, ends the process when there is no progress for `timeout_seconds`.

    The time in which the machine is suspended, or the process stopped (Ctrl-Z), does not count. The last resort cannot
    tell a stopped process: it ends one that was stopped for longer than the timeout and `last_resort_seconds` when it
    goes on. It is faulthandler's one timer (`dump_traceback_later`): one watchdog in a process at a time. It is left
    out where that timer goes by the time of day (Python 3.10). A forked child has no watchdog.

    Args:
      progress: returns (phase, token); whenever the pair has changed there was progress. Called in a thread of its own:
        slowness and errors of it are no progress, and do no other harm.
      folder: where the stacks are written, as stacks-<UTC time>.txt.
      timeout_seconds: the longest time without progress; None: only the warning.
      warn_after_seconds: when to warn, once per stall.
      poll_seconds: between two looks.
      on_stall: called before the end, in another thread; it gets a few seconds.
      exit: ends the process with the given code at once, without the cleaning-up that could stall as well.
      last_resort_seconds: how long after the timeout the last resort ends a process whose threads cannot run.
    """

    def __init__(
        self,
        progress: Callable[[], tuple[str, object]],
        folder: str | os.PathLike[str],
        timeout_seconds: float | None,
        warn_after_seconds: float = 30.0,
        poll_seconds: float = 1.0,
        on_stall: Callable[[], None] | None = None,
        exit: Callable[[int], None] = os._exit,
        last_resort_seconds: float = 30.0,
    ) -> None:
        self._folder = Path(folder)
        self._timeout = timeout_seconds
        self._warn_after = warn_after_seconds
        self._poll = poll_seconds
        self._on_stall = on_stall
        self._exit = exit
        self._last_resort = last_resort_seconds
        self._left = threading.Event()
        self._reader = ProgressReader(progress, poll_seconds)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._reader.start()
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()  # before the timer is cancelled: it could set it again
        _TIMER.cancel()
        self._reader.stop()

    def _watch(self) -> None:
        idle, before, seen, warned = 0.0, time.monotonic(), 0, False
        while not self._left.wait(self._poll):
            self._arm()
            now = time.monotonic()
            idle += min(now - before, _LONGEST_POLL * self._poll)
            before = now
            if seen != self._reader.changes:
                if warned:
                    self._say(f"progress again after {idle:.0f} s in {self._where()}")
                idle, seen, warned = 0.0, self._reader.changes, False
            elif self._timeout is not None and idle >= self._timeout:
                self._end(idle)
                return
            elif not warned and idle >= self._warn_after:
                warned = True
                self._say(f"no progress for {self._warn_after:g} s in {self._where()}; {self._prospect()}")

    def _where(self) -> str:
        phase, token = self._reader.latest
        return f"phase {phase!r} (step {token})"

    def _prospect(self) -> str:
        if self._timeout is None:
            return "the process is never ended for it (trainer.hang_timeout_seconds is null)"
        code = f"exit code {ExitCode.STALLED:d}"
        return f"the process ends with {code} after {self._timeout:g} s (trainer.hang_timeout_seconds)"

    def _say(self, text: str) -> None:
        # The stalled thread may hold the lock of the log.
        call_within(_PATIENCE, lambda: _LOG.warning("%s", text))

    def _arm(self) -> None:
        if self._timeout is not None and _TIMER_IS_STEADY:
            _TIMER.set(self._timeout + self._last_resort)

    def _end(self, idle: float) -> None:
        try:
            what = f"no progress for {idle:.0f} s in {self._where()}"
            path = self._folder / f"stacks-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}.txt"
            stacks = _stacks()
            kept = call_within(_PATIENCE, lambda: files.write_text(path, f"{what}\n\n{stacks}", point="stacks"))
            where = f"are in {path}" if kept else f"cannot be written to {path}:\n{stacks}"
            text = (
                f"error: {what}; the process ends with exit code {ExitCode.STALLED:d}"
                f" (trainer.hang_timeout_seconds is {self._timeout:g}); the stacks of all threads {where}\n"
            )
            call_within(_PATIENCE, lambda: os.write(_STANDARD_ERROR, text.encode()))
            if self._on_stall is not None:
                call_within(_PATIENCE, self._on_stall)
        finally:
            self._exit(ExitCode.STALLED)


def _stacks() -> str:
    names = "\n".join(f"Thread 0x{thread.ident or 0:016x} is {thread.name}" for thread in threading.enumerate())
    try:
        with tempfile.TemporaryFile() as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            return f"{names}\n\n{stream.read().decode(errors='replace')}"
    except OSError as error:
        return f"{names}\n\nthe stacks cannot be taken: {error}\n"


class _Timer:
    """The timer of faulthandler, which a forked child must not inherit: it would wait for ever when it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        unlock = self._lock.release
        os.register_at_fork(before=self._before_fork, after_in_parent=unlock, after_in_child=unlock)

    def set(self, seconds: float) -> None:
        """Ends the process after so many seconds, unless it is set again or cancelled before."""
        with self._lock, contextlib.suppress(RuntimeError):  # no more threads: go on without a last resort
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)
            self._is_set = True

    def cancel(self) -> None:
        """Lets the process live; a timer that others have set stays if this one is not set."""
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
