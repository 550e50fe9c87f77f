"""SIGTERM and Ctrl-C, seen at once although Python's own handlers wait for the running TensorFlow call.

A thread reads the pipe that `signal.set_wakeup_fd` writes to. The first signal asks the run to stop; a second Ctrl-C
ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from trainer_kit.errors import ExitCode

_WATCHED = (signal.SIGTERM, signal.SIGINT)
_LOG = logging.getLogger(__name__)
_SAVED, _LOST = "the last step is saved", "what came after the last checkpoint is lost"
_MOMENT = 0.5  # seconds in which the main thread may still end by itself, after all was saved
_GLANCE = 0.05  # seconds between two looks at whether it has


class StopSignals:
    """While entered, calls `on_stop` from a thread when SIGTERM or SIGINT arrives; in the main thread only.

    Whoever sends SIGTERM follows it up with SIGKILL. So when the main thread is still at work after half of the grace
    time, in a compilation or in one very long step, `on_late` saves what can be saved. The process ends as soon as it
    has, and at the end of the grace time if it cannot, with the exit code of the signal.

    One inside another hears of the same signals, of one that came before it was entered too: none is lost between two
    runs of a longer job.

    Args:
      on_stop: makes the run stop soon; called once.
      grace_seconds: how long the process may last after the first signal; None: as long as it takes.
      on_late: called in a thread, once, after half of them; returns whether all is saved, so that nothing is left to
        wait for.
    """

    def __init__(
        self,
        on_stop: Callable[[], None],
        grace_seconds: float | None = None,
        on_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_stop, self._grace, self._on_late = on_stop, grace_seconds, on_late
        self._received: signal.Signals | None = None
        self._left = threading.Event()
        self._handlers: dict[int, object] = {}
        self._reader, self._writer, self._wakeup = -1, -1, -1

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that arrived, if any."""
        return self._received

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            with _telling:
                _entered.append(self)
                outermost = _entered[0]
                if outermost is self:
                    self._listen()
                elif outermost.received is not None:
                    self._hear(outermost.received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        with _telling:
            if self in _entered:
                _entered.remove(self)
        if self._writer >= 0:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            os.close(self._writer)  # ends the thread, which closes the reader

    def _listen(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._handlers = {number: signal.signal(number, _leave_it_to_the_thread) for number in _WATCHED}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()

    def _watch(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(1):
                number = numbers[0]
                if number not in _WATCHED:
                    continue
                if self._received is None:
                    with _telling:
                        for one in (self, *(inner for inner in _entered if inner is not self)):
                            one._hear(signal.Signals(number))
                    again = "; a second Ctrl-C leaves at once" if number == signal.SIGINT else ""
                    _LOG.warning("%s: stopping%s", signal.Signals(number).name, again)
                elif number == signal.SIGINT:
                    print("left at once: what came after the last checkpoint is lost", file=sys.stderr, flush=True)
                    os._exit(ExitCode.INTERRUPTED)

    def _hear(self, received: signal.Signals) -> None:
        self._received = received
        if self._grace is not None:
            threading.Thread(target=self._end_in_time, name="grace-time", daemon=True).start()
        self._on_stop()

    def _end_in_time(self) -> None:
        assert self._grace is not None
        begin = time.monotonic()
        if self._left.wait(self._grace / 2):
            return
        saved = threading.Event()

        def save() -> None:
            if self._on_late():
                saved.set()

        threading.Thread(target=save, name="late-save", daemon=True).start()
        while time.monotonic() < begin + self._grace - _MOMENT and not saved.is_set():
            if self._left.wait(_GLANCE):
                return
        if self._left.wait(_MOMENT):
            return
        print(
            f"ended after {time.monotonic() - begin:.1f} s of the grace time, {self._grace:g} s "
            f"(trainer.preemption_grace_seconds); {_SAVED if saved.is_set() else _LOST}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ExitCode.INTERRUPTED if self._received == signal.SIGINT else ExitCode.PREEMPTED)


_entered: list[StopSignals] = []  # by the main thread; the outermost, which listens, comes first
_telling = threading.Lock()  # held while one of them is told, or the list changes


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python's handler: only there so that the signal reaches the pipe."""
