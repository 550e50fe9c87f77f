"""Handles the signals of a command outside a run: from its first line until the run begins, and after the run's end.

It imports next to nothing, so that it can come before all other imports. Its handlers raise nothing: an error of a
signal handler during the import of an extension such as NumPy's or TensorFlow's is lost, or becomes an ImportError.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from types import FrameType

_PREEMPTED, _INTERRUPTED = os.EX_TEMPFAIL, 128 + signal.SIGINT  # errors.ExitCode, which takes longer to import
_TOGETHER = 0.3  # seconds between two signals that a launcher forwards together
_interrupted = False  # whether SIGINT has arrived
_code: int | None = None  # the exit code of the command, once its work is done


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a process to stop; without SIGHUP if it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_code(number: int) -> int:
    """Returns the exit code of a process that a signal stopped: 130 for SIGINT, which is Ctrl-C, else 75."""
    return _INTERRUPTED if number == signal.SIGINT else _PREEMPTED


def leave_when_asked() -> None:
    """From now on a stop signal ends this process at once; commands call it first.

    Before a run begins there is nothing to save. A run sets other signal handlers and restores these at its end.
    """
    atexit.register(_ignore)  # the first one to be registered is called last
    os.register_at_fork(after_in_child=_give_back)
    for number in stop_signals():
        signal.signal(number, _leave)


def ends_with(code: int) -> int:
    """Returns `code`; from now on the process ends with it, even if a signal arrives while Python shuts down."""
    global _code
    _code = code
    return code


def code_of_command() -> int | None:
    """Returns the exit code of a command whose work is done; None before that, and in a program of the user."""
    return _code if signal.getsignal(signal.SIGTERM) is _leave else None


def _leave(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if number == signal.SIGINT:
        if _interrupted:
            return
        # A SIGTERM that comes with it decides the exit code, and Python answers signals in the order of their numbers.
        _interrupted = True
        time.sleep(_TOGETHER)
        signal.raise_signal(signal.SIGINT)  # makes Python handle signals that came meanwhile: SIGTERM ends it here
        time.sleep(0)
    if _code is None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"stopped by {signal.Signals(number).name}; there was nothing to save\n".encode())
    with contextlib.suppress(Exception):  # this may have come in the middle of a write
        sys.stdout.flush()
    ends = _INTERRUPTED if _code is None else _code
    os._exit(exit_code(number) if ends == _INTERRUPTED else ends)  # SIGTERM after Ctrl-C asks for a restart


def _ignore() -> None:
    """Ignores stop signals at the end of Python, since a signal would change the exit code."""
    for number in stop_signals():
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)


def _give_back() -> None:
    """Restores Python's default signal handlers in a forked child."""
    for number in stop_signals():
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
