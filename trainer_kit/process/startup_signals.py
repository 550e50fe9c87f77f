"""Ends a command that a signal asks to stop before its run listens.

There is nothing to save yet. This module imports next to nothing, so that it can come before all
other imports. Its handler raises nothing: an error of a signal handler during the import of an
extension such as NumPy's or TensorFlow's is lost, or becomes an ImportError.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

# The codes of errors.ExitCode, which takes longer to import.
_PREEMPTED = os.EX_TEMPFAIL
_INTERRUPTED = 128 + signal.SIGINT

# The time between two signals that a launcher forwards together.
_FORWARD_SECONDS = 0.3

_command_exit_code: int | None = None


def get_stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a process to stop.

    SIGHUP is not among them if it is ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def get_signal_exit_code(number: int) -> int:
    """Returns the exit code of a process that a signal stopped.

    It is 130 for SIGINT, which is Ctrl-C, else 75.
    """
    return _INTERRUPTED if number == signal.SIGINT else _PREEMPTED


def install_exit_handlers() -> None:
    """Makes a stop signal end this process at once. Commands call it first.

    A run sets other signal handlers and restores these at its end.
    """
    for number in get_stop_signals():
        signal.signal(number, _exit_on_signal)


def record_exit_code(code: int) -> int:
    """Records that the work of the command is done, and returns `code`, its exit code."""
    global _command_exit_code
    _command_exit_code = code
    return code


def get_command_exit_code() -> int | None:
    """Returns the exit code of a command whose work is done.

    Returns None before that, and in a program of the user.
    """
    return _command_exit_code


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    if _command_exit_code is not None:
        os._exit(_command_exit_code)

    if number == signal.SIGINT:
        # A SIGTERM that comes with it decides the exit code. Python calls handlers in the order of
        # the numbers, so one that is already here is answered only when another signal arrives.
        signal.signal(signal.SIGINT, lambda *_: None)
        time.sleep(_FORWARD_SECONDS)
        signal.raise_signal(signal.SIGINT)
    try:
        name = signal.Signals(number).name
        os.write(2, f"stopped by {name}; there was nothing to save\n".encode())
    finally:
        # The terminal may be gone.
        os._exit(get_signal_exit_code(number))
