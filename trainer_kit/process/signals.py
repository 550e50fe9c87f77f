"""Handles SIGTERM, SIGHUP and Ctrl-C at once, although Python's handlers wait for the current TensorFlow call.

A thread reads the pipe that `signal.set_wakeup_fd` writes to. The first signal asks the run to
stop. Launchers forward SIGTERM and SIGINT together, and one key press may arrive twice: only a
second SIGINT, at least a second after the first one, ends the process at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from trainer_kit.errors import InterruptedRunError, PreemptedError
from trainer_kit.process.startup_signals import (
    get_command_exit_code,
    get_signal_exit_code,
    get_stop_signals,
)

_LOG = logging.getLogger(__name__)
_SAVED, _LOST = "nothing is lost", "the steps after the last checkpoint are lost"
_EXIT_SECONDS = 0.5  # seconds in which the main thread may still end by itself, after all was saved
_BUILD_GRACE_SECONDS = (
    1.0  # seconds in which a run that is still being built may end by itself, and remove its files
)
_POLL_SECONDS = 0.05  # seconds between two checks whether it has ended
BEFORE_FIRST_STEP = "before the first step; the same command starts the run again"
MIN_KEY_PRESS_SECONDS = 1.0  # seconds; two SIGINT in less time are one forwarded key press


def select_deciding_signal(
    earlier: signal.Signals | None, number: signal.Signals
) -> signal.Signals:
    """Returns the signal that decides the exit code: the first SIGTERM or SIGHUP if one arrived, else SIGINT."""
    return number if earlier in (None, signal.SIGINT) else earlier


class StoppableRun:
    """A run that signals can stop. The base class does nothing: its run asks for the signals by itself."""

    def stop(self) -> None:
        """Makes the run stop soon; called once, in a thread."""

    def abort_startup(self) -> bool:
        """Removes the files of a run that is still being built; returns whether it is, so that the process ends.

        Called in a thread, a second after the first signal.
        """
        return False

    def save_late(self) -> bool:
        """Saves the state if it can; returns whether all is saved, so that the process may end.

        Called once in a thread, after half of the grace time.
        """
        return False


class StopSignals:
    """While entered, stops a run from a thread when SIGTERM, SIGHUP or SIGINT arrives; in the main thread only.

    SIGKILL usually follows SIGTERM. So if the main thread is still at work after half of the grace
    time, in a compilation or in one very long step, the run saves its state if it can. The process
    ends as soon as that is done, or at the end of the grace time, with the exit code of the signal.
    A run that is still being built has nothing to
    save: the process ends a second after the signal. SIGHUP does nothing if it was ignored before,
    as under nohup. Forked children do not inherit this handling.

    A nested StopSignals receives the same signals, also one that arrived before it was entered. So
    no signal is lost between two runs of a longer job.

    Args:
      run: The run that is stopped; None: one that looks at the signals itself.
      grace_seconds: The seconds that the process may live after the first signal; None: no limit.
      clock: Returns the time in seconds; read at each SIGINT.

    Attributes:
      reason: Why the run stops, if `stop` was called before a signal arrived; else "".
    """

    def __init__(
        self,
        run: StoppableRun | None = None,
        grace_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run or StoppableRun()
        self._grace = grace_seconds
        self._clock = clock
        self._received_signal: signal.Signals | None = None
        self.reason = ""
        self._first_interrupt_time: float | None = None  # when the first SIGINT came
        self._exit_event = threading.Event()
        self._handlers: dict[int, object] = {}
        self._reader, self._writer, self._wakeup = -1, -1, -1

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that decides the exit code: SIGTERM or SIGHUP if one arrived, else SIGINT; None: no signal."""
        return self._received_signal

    def is_stop_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received_signal is not None

    def stop(self, reason: str) -> None:
        """Stops the run like a SIGTERM; callable from any thread.

        Args:
          reason: Why the run stops, for the message "stopped by <reason> <where>".
        """
        with _signal_lock:
            for signals in dict.fromkeys((self, *_entered_handlers)):
                if signals._received_signal is None:
                    signals.reason = reason
                    signals._record_signal(signal.SIGTERM)

    @property
    def _stop_cause(self) -> str:
        return self.reason or (self._received_signal.name if self._received_signal else "")

    def check_not_stopped(self, where: str) -> None:
        """Raises PreemptedError, or InterruptedRunError for SIGINT, when a signal has arrived.

        Args:
          where: Where the run stops, for the message "stopped by SIGTERM <where>".
        """
        if self._received_signal is not None:
            kind = InterruptedRunError if self._received_signal == signal.SIGINT else PreemptedError
            raise kind(f"stopped by {self._stop_cause} {where}")

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            with _signal_lock:
                _entered_handlers.append(self)
                outermost = _entered_handlers[0]
                if outermost is self:
                    self._listen()
                elif outermost.received_signal is not None:
                    self.reason = outermost.reason
                    self._record_signal(outermost.received_signal)
        else:
            _LOG.warning(
                "SIGTERM and Ctrl-C will not save this run, since it is not in the main thread of"
                " its process"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restores the former signal handlers.

        Raises:
          PreemptedError: instead of an InterruptedRunError, when a SIGTERM has arrived since that
            was raised.
        """
        self._exit_event.set()
        with _signal_lock:
            if self in _entered_handlers:
                _entered_handlers.remove(self)
        if self._writer >= 0:
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writer)  # ends the thread, which closes the reader
        if isinstance(error, InterruptedRunError) and self._received_signal not in (
            None,
            signal.SIGINT,
        ):
            raise PreemptedError(str(error)) from error

    def _listen(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The pipe comes first: the former handler or this one answers a signal between these two
        # statements.
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, _ignore_in_main_thread) for number in get_stop_signals()
        }
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()

    def _watch(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(1):
                if numbers[0] in self._handlers:
                    self._handle_signal(signal.Signals(numbers[0]))

    def _handle_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            now = self._clock()
            if self._first_interrupt_time is None:
                self._first_interrupt_time = now
            elif now - self._first_interrupt_time >= MIN_KEY_PRESS_SECONDS:
                self._exit_process("left at once: the steps after the last checkpoint are lost")
        before = self._received_signal
        with _signal_lock:
            for signals in (self, *(inner for inner in _entered_handlers if inner is not self)):
                signals._record_signal(number)
        if before is None:
            again = (
                "; press Ctrl-C again after a second to end without saving"
                if number == signal.SIGINT
                else ""
            )
            _LOG.warning("%s: stopping%s", number.name, again)
        elif before != self._received_signal:
            _LOG.warning(
                "%s arrived while the run was stopping; it still stops, with the exit code of"
                " %s, %d",
                number.name,
                number.name,
                get_signal_exit_code(number),
            )

    def _record_signal(self, number: signal.Signals) -> None:
        first, self._received_signal = (
            self._received_signal is None,
            select_deciding_signal(self._received_signal, number),
        )
        if first:
            threading.Thread(
                target=self._enforce_grace_time, name="grace-time", daemon=True
            ).start()
            self._run.stop()

    def _enforce_grace_time(self) -> None:
        begin = time.monotonic()
        self._wait_for_run_end(begin)
        if self._grace is None:
            return
        time.sleep(max(0.0, begin + self._grace - _EXIT_SECONDS - time.monotonic()))
        code = get_command_exit_code()
        if code is not None or not threading.main_thread().is_alive():
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            self._exit_process(
                "ended at the end of the grace time; threads, children or atexit handlers were at"
                " work",
                code,
            )

    def _wait_for_run_end(self, begin: float) -> None:
        """Returns when the run has ended; ends the process at the end of the grace time."""
        half = math.inf if self._grace is None else self._grace / 2
        if self._exit_event.wait(min(_BUILD_GRACE_SECONDS, half)):
            return
        if self._run.abort_startup():
            assert self._received_signal is not None
            self._exit_process(f"stopped by {self._stop_cause} {BEFORE_FIRST_STEP}")
        if self._grace is None or self._exit_event.wait(max(0.0, begin + half - time.monotonic())):
            return
        saved = threading.Event()

        def save() -> None:
            if self._run.save_late():
                saved.set()

        threading.Thread(target=save, name="late-save", daemon=True).start()
        while time.monotonic() < begin + self._grace - _EXIT_SECONDS and not saved.is_set():
            if self._exit_event.wait(_POLL_SECONDS):
                return
        if self._exit_event.wait(_EXIT_SECONDS):
            return
        self._exit_process(
            f"stopped by {self._stop_cause}: ended after {time.monotonic() - begin:.1f} s of the grace"
            f" time, which is {self._grace:g} s (trainer.preemption_grace_seconds);"
            f" {_SAVED if saved.is_set() else _LOST}"
        )

    def _exit_process(self, text: str, code: int | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            print(text, file=sys.stderr, flush=True)
        assert self._received_signal is not None
        os._exit(get_signal_exit_code(self._received_signal) if code is None else code)


_entered_handlers: list[
    StopSignals
] = []  # entered by the main thread; the outermost, which listens, comes first
_signal_lock = threading.Lock()  # held while a signal is handed to them, or the list changes


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing; Python needs a handler to write the signal to the pipe."""


def _before_fork() -> None:
    global _mask
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, get_stop_signals())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _reset_signals_in_child() -> None:
    """Resets the signals of a forked child, which shares the pipe: its signals would stop the run instead of itself."""
    if signal.getsignal(signal.SIGTERM) is _ignore_in_main_thread:
        _entered_handlers.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # Ctrl-C on the terminal reaches all: the run saves with its data
    _after_fork()


_mask: set[int | signal.Signals] = (
    set()
)  # of the thread that forks; a signal to the new child waits until it is ready
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_reset_signals_in_child
)
