"""Watches the run's main thread from a separate thread, so that long activities can be shown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from trainer_kit.telemetry.report import EVALUATING, TRAINING, Activity

_LOG = logging.getLogger(__name__)


class RunProgress(Protocol):
    """A run whose activity can be shown.

    The methods are called from a separate thread.
    """

    def describe_activity(self) -> tuple[str, int, int, int]:
        """Returns the activity of the run.

        Returns:
          (name, the global step at which it began, the global step now, the number of batches that
          this process has evaluated). The name is "" while no activity is to be shown.
        """
        ...

    def find_total(self, activity: str) -> int | None:
        """Returns the number of batches of an evaluation, or of steps of the run.

        Returns None if it is not known.
        """
        ...


class ActivityWatcher:
    """While entered, shows the run's current activity, without any work of the main thread.

    After an error, which is logged once, nothing more is shown.

    Args:
      run: The run.
      show: A function that is called with the activity at each poll, and with None when it is over.
      poll_seconds: The seconds between two polls.
      clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        run: RunProgress,
        show: Callable[[Activity | None], None],
        poll_seconds: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._show = show
        self._poll_seconds = poll_seconds
        self._clock = clock
        # The number of evaluated batches when the last evaluation was over.
        self._batches_before = 0
        # The activity, its first step, and the time when it was first observed.
        self._activity_start: tuple[str, int, float] | None = None
        self._total: int | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="activity watch", daemon=True)

    def __enter__(self) -> ActivityWatcher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops showing activities. A second call does nothing."""
        self._stop_event.set()
        self._thread.join()

    def poll(self) -> None:
        """Polls once and shows the activity of the run, unless its name is ""."""
        name, first_step, step, batches = self._run.describe_activity()
        if self._activity_start is not None and (name, first_step) != self._activity_start[:2]:
            self._activity_start = None
            self._total = None
            self._batches_before = batches
            self._show(None)
        if name != EVALUATING:
            self._batches_before = batches
        if not name:
            return

        if self._activity_start is None:
            self._activity_start = (name, first_step, self._clock())
        if self._total is None:
            self._total = self._run.find_total(name)
        completed = 0
        if name == EVALUATING:
            completed = batches - self._batches_before
        elif name == TRAINING:
            completed = step - first_step
        seconds = self._clock() - self._activity_start[2]
        self._show(Activity(name, step, completed, self._total, seconds))

    def _watch(self) -> None:
        try:
            while not self._stop_event.wait(self._poll_seconds):
                self.poll()
            self._show(None)
        except Exception as error:
            _LOG.warning("the run's current activity is no longer shown: %r", error)
