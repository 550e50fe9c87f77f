"""Looks now and then, from a thread of its own, at what takes the run's main thread long, so that it can be shown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from trainer_kit.telemetry.report import EVALUATING, TRAINING, Activity

_LOG = logging.getLogger(__name__)
Look = Callable[[], tuple[str, int, int, int]]


class CurrentActivity:
    """While entered, shows what the run is doing; the run itself does nothing for it.

    An error is logged once, and nothing more is shown.

    Args:
      look: returns (what the run is doing, the global step at which that began, the global step now, the batches
        evaluated in the life of this process); "" while it does nothing that is worth showing.
      total: returns of how many batches an evaluation, or steps a training run, consists; None where that is not known.
      show: takes the activity, at each look; None when it is over.
      poll_seconds: between two looks.
      clock: seconds that only go up.
    """

    def __init__(
        self,
        look: Look,
        total: Callable[[str], int | None],
        show: Callable[[Activity | None], None],
        poll_seconds: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._total, self._show = look, total, show
        self._poll, self._clock = poll_seconds, clock
        self._before = 0  # batches, when the last evaluation was over
        self._since: tuple[str, int, float] | None = None  # the activity, its first step, and when it was first seen
        self._known: int | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="activity watch", daemon=True)

    def __enter__(self) -> CurrentActivity:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Shows nothing more; a second call does nothing."""
        self._left.set()
        self._thread.join()

    def look(self) -> None:
        """Looks once, and shows what there is to be seen."""
        what, begun, step, batches = self._look()
        if self._since is not None and (what, begun) != self._since[:2]:
            self._since, self._known, self._before = None, None, batches
            self._show(None)
        if what != EVALUATING:
            self._before = batches
        if not what:
            return
        if self._since is None:
            self._since = what, begun, self._clock()
        self._known = self._total(what) if self._known is None else self._known
        done = {EVALUATING: batches - self._before, TRAINING: step - begun}.get(what, 0)
        self._show(Activity(what, step, done, self._known, self._clock() - self._since[2]))

    def _watch(self) -> None:
        try:
            while not self._left.wait(self._poll):
                self.look()
            self._show(None)
        except Exception as error:
            _LOG.warning("what the run is doing is no longer shown: %r", error)
