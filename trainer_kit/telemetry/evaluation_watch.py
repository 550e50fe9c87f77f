"""Looks now and then, from a thread of its own, how far a running evaluation is, so that it can be shown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from trainer_kit.telemetry.report import EvaluationProgress

_LOG = logging.getLogger(__name__)
Look = Callable[[], tuple[bool, int, int]]


class EvaluationWatch:
    """While entered, shows the evaluation that is under way; the evaluation itself does nothing for it.

    An error is logged once, and nothing more is shown.

    Args:
      look: returns (whether an evaluation is under way, global step, batches evaluated in the life of this process).
      total: returns how many batches an evaluation has; None where that is not known, or not yet.
      show: takes the progress, at each look; None when the evaluation is over.
      poll_seconds: between two looks.
      clock: seconds that only go up.
    """

    def __init__(
        self,
        look: Look,
        total: Callable[[], int | None],
        show: Callable[[EvaluationProgress | None], None],
        poll_seconds: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._total, self._show = look, total, show
        self._poll, self._clock = poll_seconds, clock
        self._before = 0  # batches, when the last evaluation was over
        self._since: tuple[int, float] | None = None  # the step of the evaluation, and when it was first seen
        self._known: int | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evaluation watch", daemon=True)

    def __enter__(self) -> EvaluationWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def look(self) -> None:
        """Looks once, and shows what there is to be seen."""
        evaluates, step, batches = self._look()
        if self._since is not None and not (evaluates and step == self._since[0]):
            self._since, self._known, self._before = None, None, batches
            self._show(None)
        if not evaluates:
            self._before = batches
            return
        if self._since is None:
            self._since = step, self._clock()
        self._known = self._total() if self._known is None else self._known
        seconds = self._clock() - self._since[1]
        self._show(EvaluationProgress(step, batches - self._before, self._known, seconds))

    def _watch(self) -> None:
        try:
            while not self._left.wait(self._poll):
                self.look()
            self._show(None)
        except Exception as error:
            _LOG.warning("evaluations are no longer shown while they are under way: %r", error)
