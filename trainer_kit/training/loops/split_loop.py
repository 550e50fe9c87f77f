"""Splits a loop of steps into several calls, so that something can be done between two steps. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer_kit.telemetry.profile_window import NO_WINDOW, parts

Loop = Callable[[Any, Any, bool], tuple[int, Any]]


class LoopParts:
    """Runs the loops of a trainer; nothing of a run depends on how many calls a loop takes.

    The first step of a new loop function is a call of its own: tracing and compiling are in it, and as a rule the
    longest wait for data. Of a loop with an attribute `fuse_steps` it is so many: stops come between programs only.

    Args:
      step: returns the global step; asked for only when there may be something to do between two steps.
      on_ready: called when the first step of a new loop function is done.

    Attributes:
      window: the steps to be traced for a profile.
      ready_at: time.perf_counter() when the first step of the newest loop function was done; 0 before.
      waited: seconds that the last loop waited for batches, without the first step of a new loop function; None where
        the loop function has no attribute of this name, or None there.
      results: of the last loop; None if it has not read them, or they were taken.
      tracing: seconds that the last loop took to begin a trace and to write it.
    """

    def __init__(self, step: Callable[[], int], on_ready: Callable[[], None] = lambda: None) -> None:
        self.window, self.ready_at = NO_WINDOW, 0.0
        self.waited: float | None = None
        self.tracing = 0.0
        self.results: Any = None
        self._step, self._on_ready = step, on_ready
        self._known: Loop | None = None

    def run(self, loop: Loop, iterator: Any, num_steps: Any, fresh: bool) -> int:
        """Does what `loop(iterator, num_steps, fresh)` would, and returns the number of steps done.

        Args:
          loop: ends before `num_steps` when it was asked to stop; no further call is made then. Its attribute `waited`,
            if it has one, tells how long its last call waited for batches.
          iterator: for the loop.
          num_steps: integer, or a scalar tensor of it.
          fresh: whether the loop begins anew; every call after the first one goes on.

        Raises:
          Exception: what the loop raises; the steps done so far are done.
        """
        self.tracing, self.results = 0.0, None  # and so it stays when the data ends inside the loop
        if self.window.passed and loop is self._known:
            done, self.results = loop(iterator, num_steps, fresh)
            self.waited = getattr(loop, "waited", None)
            return done
        return self._in_parts(loop, iterator, int(num_steps), fresh)

    def _in_parts(self, loop: Loop, iterator: Any, num_steps: int, fresh: bool) -> int:
        step, done, waited, results = self._step(), 0, 0.0, None
        cuts = [*self.window.cuts(), *([] if loop is self._known else [step + getattr(loop, "fuse_steps", 1)])]
        for part in parts(step, num_steps, cuts):
            self._trace(self.window.before, step + done, step + done + part)
            count, results = loop(iterator, part, fresh and done == 0)
            done += count
            if loop is self._known:
                waited += getattr(loop, "waited", None) or 0.0
            else:
                self._known, self.ready_at = loop, time.perf_counter() - self.tracing
                self._on_ready()
            self._trace(self.window.after, step + done)
            if count < part:
                break
        self.waited = None if getattr(loop, "waited", None) is None else waited
        self.results = results
        return done

    def _trace(self, action: Callable[..., None], *steps: int) -> None:
        begin = time.perf_counter()
        action(*steps)
        self.tracing += time.perf_counter() - begin
