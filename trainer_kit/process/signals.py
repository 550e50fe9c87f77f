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
from trainer_kit.process.startup_signals import code_of_command, exit_code, stop_signals

_LOG = logging.getLogger(__name__)
_SAVED, _LOST = "nothing is lost", "the steps after the last checkpoint are lost"
_MOMENT = 0.5  # seconds in which the main thread may still end by itself, after all was saved
_BUILDING = (
    1.0  # seconds in which a run that is still being built may end by itself, and remove its files
)
_GLANCE = 0.05  # seconds between two checks whether it has ended
BEFORE_FIRST_STEP = "before the first step; the same command starts the run again"
KEY_PRESSES_APART = 1.0  # seconds; two SIGINT in less time are one forwarded key press


def deciding(before: signal.Signals | None, number: signal.Signals) -> signal.Signals:
    """Returns the signal that decides the exit code: the first SIGTERM or SIGHUP if one arrived, else SIGINT."""
    return number if before in (None, signal.SIGINT) else before


class StoppableRun:
    """A run that signals can stop. The base class does nothing: its run asks for the signals by itself."""

    def stop(self) -> None:
        """Makes the run stop soon; called once, in a thread."""

    def withdraw(self) -> bool:
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
        self._received: signal.Signals | None = None
        self.reason = ""
        self._interrupted: float | None = None  # when the first SIGINT came
        self._left = threading.Event()
        self._handlers: dict[int, object] = {}
        self._reader, self._writer, self._wakeup = -1, -1, -1

    @property
    def received(self) -> signal.Signals | None:
        """The signal that decides the exit code: SIGTERM or SIGHUP if one arrived, else SIGINT; None: no signal."""
        return self._received

    def have_arrived(self) -> bool:
        """Whether a signal has arrived."""
        return self._received is not None

    def stop(self, reason: str) -> None:
        """Stops the run like a SIGTERM; callable from any thread.

        Args:
          reason: Why the run stops, for the message "stopped by <reason> <where>".
        """
        with _receiving:
            for signals in dict.fromkeys((self, *_entered)):
                if signals._received is None:
                    signals.reason = reason
                    signals._hear(signal.SIGTERM)

    @property
    def _name(self) -> str:
        return self.reason or (self._received.name if self._received else "")

    def check(self, where: str) -> None:
        """Raises PreemptedError, or InterruptedRunError for SIGINT, when a signal has arrived.

        Args:
          where: Where the run stops, for the message "stopped by SIGTERM <where>".
        """
        if self._received is not None:
            kind = InterruptedRunError if self._received == signal.SIGINT else PreemptedError
            raise kind(f"stopped by {self._name} {where}")

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            with _receiving:
                _entered.append(self)
                outermost = _entered[0]
                if outermost is self:
                    self._listen()
                elif outermost.received is not None:
                    self.reason = outermost.reason
                    self._hear(outermost.received)
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
        self._left.set()
        with _receiving:
            if self in _entered:
                _entered.remove(self)
        if self._writer >= 0:
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writer)  # ends the thread, which closes the reader
        if isinstance(error, InterruptedRunError) and self._received not in (None, signal.SIGINT):
            raise PreemptedError(str(error)) from error

    def _listen(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The pipe comes first: the former handler or this one answers a signal between these two
        # statements.
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, _leave_it_to_the_thread) for number in stop_signals()
        }
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()

    def _watch(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(1):
                if numbers[0] in self._handlers:
                    self._answer(signal.Signals(numbers[0]))

    def _answer(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            now = self._clock()
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted >= KEY_PRESSES_APART:
                self._leave("left at once: the steps after the last checkpoint are lost")
        before = self._received
        with _receiving:
            for signals in (self, *(inner for inner in _entered if inner is not self)):
                signals._hear(number)
        if before is None:
            again = (
                "; press Ctrl-C again after a second to end without saving"
                if number == signal.SIGINT
                else ""
            )
            _LOG.warning("%s: stopping%s", number.name, again)
        elif before != self._received:
            _LOG.warning(
                "%s arrived while the run was stopping; it still stops, with the exit code of"
                " %s, %d",
                number.name,
                number.name,
                exit_code(number),
            )

    def _hear(self, number: signal.Signals) -> None:
        first, self._received = self._received is None, deciding(self._received, number)
        if first:
            threading.Thread(target=self._end_in_time, name="grace-time", daemon=True).start()
            self._run.stop()

    def _end_in_time(self) -> None:
        begin = time.monotonic()
        self._stop_in_time(begin)
        if self._grace is None:
            return
        time.sleep(max(0.0, begin + self._grace - _MOMENT - time.monotonic()))
        code = code_of_command()
        if code is not None or not threading.main_thread().is_alive():
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            self._leave(
                "ended at the end of the grace time; threads, children or atexit handlers were at"
                " work",
                code,
            )

    def _stop_in_time(self, begin: float) -> None:
        """Returns when the run has ended; ends the process at the end of the grace time."""
        half = math.inf if self._grace is None else self._grace / 2
        if self._left.wait(min(_BUILDING, half)):
            return
        if self._run.withdraw():
            assert self._received is not None
            self._leave(f"stopped by {self._name} {BEFORE_FIRST_STEP}")
        if self._grace is None or self._left.wait(max(0.0, begin + half - time.monotonic())):
            return
        saved = threading.Event()

        def save() -> None:
            if self._run.save_late():
                saved.set()

        threading.Thread(target=save, name="late-save", daemon=True).start()
        while time.monotonic() < begin + self._grace - _MOMENT and not saved.is_set():
            if self._left.wait(_GLANCE):
                return
        if self._left.wait(_MOMENT):
            return
        self._leave(
            f"stopped by {self._name}: ended after {time.monotonic() - begin:.1f} s of the grace"
            f" time, which is {self._grace:g} s (trainer.preemption_grace_seconds);"
            f" {_SAVED if saved.is_set() else _LOST}"
        )

    def _leave(self, text: str, code: int | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            print(text, file=sys.stderr, flush=True)
        assert self._received is not None
        os._exit(exit_code(self._received) if code is None else code)


_entered: list[
    StopSignals
] = []  # entered by the main thread; the outermost, which listens, comes first
_receiving = threading.Lock()  # held while a signal is handed to them, or the list changes


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing; Python needs a handler to write the signal to the pipe."""


def _before_fork() -> None:
    global _mask
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _in_child() -> None:
    """Resets the signals of a forked child, which shares the pipe: its signals would stop the run instead of itself."""
    if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
        _entered.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # Ctrl-C on the terminal reaches all: the run saves with its data
    _after_fork()


_mask: set[int | signal.Signals] = (
    set()
)  # of the thread that forks; a signal to the new child waits until it is ready
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
