"""Handles SIGTERM, SIGHUP and Ctrl-C at once.

Python's handlers wait for the current TensorFlow call. So a thread reads the pipe that
`signal.set_wakeup_fd` writes to. The first signal asks the run to stop. Launchers forward SIGTERM
and SIGINT together, and one key press may arrive twice: only a second SIGINT, at least a second
after the first one, ends the process at once.
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
_SAVED = "nothing is lost"
_LOST = "the steps after the last checkpoint are lost"
BEFORE_FIRST_STEP = "before the first step; the same command starts the run again"

# The seconds in which the main thread may still end by itself, after all was saved.
_EXIT_SECONDS = 0.5

# The seconds in which a run that is still being built may end by itself, and remove its files.
_BUILD_GRACE_SECONDS = 1.0

# The seconds between two checks whether the run has ended.
_POLL_SECONDS = 0.05

# Two SIGINT in fewer seconds are one forwarded key press.
MIN_KEY_PRESS_SECONDS = 1.0


def select_deciding_signal(
    earlier: signal.Signals | None, number: signal.Signals
) -> signal.Signals:
    """Returns the signal that decides the exit code.

    It is the first SIGTERM or SIGHUP if one arrived, else SIGINT.
    """
    return number if earlier in (None, signal.SIGINT) else earlier


class StoppableRun:
    """A run that signals can stop.

    The base class does nothing: its run asks for the signals by itself.
    """

    def stop(self) -> None:
        """Makes the run stop soon. Called once, in a thread."""

    def abort_startup(self) -> bool:
        """Removes the files of a run that is still being built.

        Called in a thread, a second after the first signal.

        Returns:
          Whether the run is still being built, so that the process ends.
        """
        return False

    def save_late(self) -> bool:
        """Saves the state if it can.

        Called once in a thread, after half of the grace time.

        Returns:
          Whether all is saved, so that the process may end.
        """
        return False


class StopSignals:
    """While entered, stops a run from a thread when SIGTERM, SIGHUP or SIGINT arrives.

    It handles signals only if it is entered in the main thread.

    SIGKILL usually follows SIGTERM. So if the main thread is still at work after half of the grace
    time, in a compilation or in one very long step, the run saves its state if it can. The process
    ends as soon as that is done, or at the end of the grace time, with the exit code of the signal.
    A run that is still being built has nothing to save: the process ends a second after the signal.
    SIGHUP does nothing if it was ignored before, as under nohup. Forked children do not inherit
    this handling.

    A nested StopSignals receives the same signals, also one that arrived before it was entered. So
    no signal is lost between two runs of a longer job.

    Args:
      run: The run that is stopped. None means one that looks at the signals itself.
      grace_seconds: The seconds that the process may live after the first signal. None means no
        limit.
      clock: Returns the time in seconds. Read at each SIGINT.

    Attributes:
      reason: Why the run stops, if `stop` was called before a signal arrived, else "".
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
        self._first_interrupt_time: float | None = None
        self._exit_event = threading.Event()

        # The former handlers, and the descriptors of the pipe and of the former wakeup.
        self._handlers: dict[int, object] = {}
        self._reader = -1
        self._writer = -1
        self._wakeup = -1

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that decides the exit code, None if no signal arrived.

        It is SIGTERM or SIGHUP if one arrived, else SIGINT.
        """
        return self._received_signal

    def is_stop_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received_signal is not None

    def stop(self, reason: str) -> None:
        """Stops the run like a SIGTERM. Callable from any thread.

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
            is_interrupt = self._received_signal == signal.SIGINT
            error_class = InterruptedRunError if is_interrupt else PreemptedError
            raise error_class(f"stopped by {self._stop_cause} {where}")

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
                former_handler = signal.SIG_DFL if handler is None else handler
                signal.signal(number, former_handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._wakeup)
            # This ends the thread, which closes the reader.
            os.close(self._writer)

        was_terminated = self._received_signal not in (None, signal.SIGINT)
        if isinstance(error, InterruptedRunError) and was_terminated:
            raise PreemptedError(str(error)) from error

    def _listen(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The pipe comes first: the former handler or this one answers a signal that arrives between
        # these two statements.
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

        earlier_signal = self._received_signal
        with _signal_lock:
            inner_handlers = [handler for handler in _entered_handlers if handler is not self]
            for signals in (self, *inner_handlers):
                signals._record_signal(number)

        if earlier_signal is None:
            hint = ""
            if number == signal.SIGINT:
                hint = "; press Ctrl-C again after a second to end without saving"
            _LOG.warning("%s: stopping%s", number.name, hint)
        elif earlier_signal != self._received_signal:
            _LOG.warning(
                "%s arrived while the run was stopping; it still stops, with the exit code of"
                " %s, %d",
                number.name,
                number.name,
                get_signal_exit_code(number),
            )

    def _record_signal(self, number: signal.Signals) -> None:
        is_first = self._received_signal is None
        self._received_signal = select_deciding_signal(self._received_signal, number)
        if is_first:
            threading.Thread(
                target=self._enforce_grace_time, name="grace-time", daemon=True
            ).start()
            self._run.stop()

    def _enforce_grace_time(self) -> None:
        begin = time.monotonic()
        self._wait_for_run_end(begin)
        if self._grace is None:
            return

        # The run has ended, but its process may not: threads, children or atexit handlers may hang.
        deadline = begin + self._grace - _EXIT_SECONDS
        time.sleep(max(0.0, deadline - time.monotonic()))
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
        """Returns when the run has ended. Ends the process at the end of the grace time."""
        # A run that is still being built ends after a second.
        half = math.inf if self._grace is None else self._grace / 2
        if self._exit_event.wait(min(_BUILD_GRACE_SECONDS, half)):
            return
        if self._run.abort_startup():
            assert self._received_signal is not None
            self._exit_process(f"stopped by {self._stop_cause} {BEFORE_FIRST_STEP}")

        # Any other run may end by itself in the first half of the grace time.
        if self._grace is None:
            return
        remaining_seconds = max(0.0, begin + half - time.monotonic())
        if self._exit_event.wait(remaining_seconds):
            return

        # After it a thread saves, since the main thread may hang.
        save_done = threading.Event()

        def save() -> None:
            if self._run.save_late():
                save_done.set()

        threading.Thread(target=save, name="late-save", daemon=True).start()
        deadline = begin + self._grace - _EXIT_SECONDS
        while time.monotonic() < deadline and not save_done.is_set():
            if self._exit_event.wait(_POLL_SECONDS):
                return
        if self._exit_event.wait(_EXIT_SECONDS):
            return
        outcome = _SAVED if save_done.is_set() else _LOST
        self._exit_process(
            f"stopped by {self._stop_cause}: ended after {time.monotonic() - begin:.1f} s of the"
            f" grace time, which is {self._grace:g} s (trainer.preemption_grace_seconds);"
            f" {outcome}"
        )

    def _exit_process(self, text: str, code: int | None = None) -> None:
        # The terminal may be gone.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        assert self._received_signal is not None
        os._exit(get_signal_exit_code(self._received_signal) if code is None else code)


# The handlers that the main thread has entered. The outermost, which listens, comes first.
_entered_handlers: list[StopSignals] = []

# Held while a signal is handed to the handlers, or while their list changes.
_signal_lock = threading.Lock()


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing. Python needs a handler to write the signal to the pipe."""


def _before_fork() -> None:
    global _mask
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, get_stop_signals())


def _restore_signal_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _reset_signals_in_child() -> None:
    """Resets the signals of a forked child.

    The child shares the pipe: its signals would stop the run instead of itself.
    """
    if signal.getsignal(signal.SIGTERM) is _ignore_in_main_thread:
        _entered_handlers.clear()
        signal.set_wakeup_fd(-1)
        # SIGINT stays: Ctrl-C on the terminal reaches all, and the run saves with its data.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_signal_mask()


# The mask of the thread that forks. A signal to the new child waits until the child is ready.
_mask: set[int | signal.Signals] = set()
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_restore_signal_mask,
    after_in_child=_reset_signals_in_child,
)
