"""How a command answers signals while no run answers them: from its first line until the run begins, and after its end.

Imports next to nothing, so that it can come before all other imports. Nothing is raised: what a signal handler raises
while an extension such as NumPy's or TensorFlow's is imported is lost, or becomes an ImportError.
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
_interrupted = False  # whether SIGINT has come
_code: int | None = None  # that the command ends with, once its work is done


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a process to stop: SIGHUP is none of them where it is ignored, as below nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_code(number: int) -> int:
    """Returns the exit code of a process that a signal has stopped: 130 for SIGINT, which is Ctrl-C, else 75."""
    return _INTERRUPTED if number == signal.SIGINT else _PREEMPTED


def leave_when_asked() -> None:
    """From now on a signal that asks to stop ends this process at once; for commands, as their first act.

    Before a run begins there is nothing to save. A run has signal handlers of its own, and gives these back at its end.
    """
    atexit.register(_ignore)  # the first one to be registered is called last
    os.register_at_fork(after_in_child=_give_back)
    for number in stop_signals():
        signal.signal(number, _leave)


def ends_with(code: int) -> int:
    """Returns `code`, with which the process ends from now on, whatever signal comes while Python shuts down."""
    global _code
    _code = code
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if number == signal.SIGINT:
        if _interrupted:
            return
        # A SIGTERM that comes with it decides the exit code, and Python answers signals in the order of their numbers.
        _interrupted = True
        time.sleep(_TOGETHER)
        signal.raise_signal(signal.SIGINT)  # has Python answer all that came meanwhile: a SIGTERM ends the process here
        time.sleep(0)
    if _code is None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"stopped by {signal.Signals(number).name}; there was nothing to save\n".encode())
    with contextlib.suppress(Exception):  # this may have come in the middle of a write
        sys.stdout.flush()
    ends = _INTERRUPTED if _code is None else _code
    os._exit(exit_code(number) if ends == _INTERRUPTED else ends)  # SIGTERM after Ctrl-C asks for a restart


def _ignore() -> None:
    """The last moment of Python: the exit code is known, and a signal would change it."""
    for number in stop_signals():
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)


def _give_back() -> None:
    """A forked child answers signals as if there were no command."""
    for number in stop_signals():
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
