"""Turns a stop signal into an exception in the main thread.

So a verb removes temporary files before it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from trainer_kit.process.signals import MIN_KEY_PRESS_SECONDS, select_deciding_signal
from trainer_kit.process.startup_signals import get_signal_exit_code, get_stop_signals


class StopSignalHandler:
    """While entered, SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit.

    It handles signals only if it is entered in the main thread. An import of TensorFlow may turn
    these exceptions into an ImportError. `received_signal` keeps the signal that really arrived. A
    second signal, at least a second later, ends the process at once.

    Attributes:
      received_signal: The signal that decides the exit code, or None. See
        `signals.select_deciding_signal`.
    """

    def __init__(self) -> None:
        self.received_signal: signal.Signals | None = None
        self._first_signal_time = 0.0
        self._handlers: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> StopSignalHandler:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._stop) for number in get_stop_signals()
            }
            self._hook = sys.unraisablehook
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._handlers:
            sys.unraisablehook = self._hook

    def _stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received_signal is None:
            self.received_signal = signal.Signals(number)
            self._first_signal_time = now
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(get_signal_exit_code(number))

        self.received_signal = select_deciding_signal(self.received_signal, signal.Signals(number))
        if now - self._first_signal_time >= MIN_KEY_PRESS_SECONDS:
            os._exit(get_signal_exit_code(self.received_signal))

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Handles an exception that Python would only print and drop, as in a destructor."""
        if self.received_signal is not None and issubclass(
            unraisable.exc_type, (KeyboardInterrupt, SystemExit)
        ):
            os._exit(get_signal_exit_code(self.received_signal))
        self._hook(unraisable)
