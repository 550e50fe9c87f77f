"""Splits a loop of steps into several calls, so that work can be done between two steps. Pure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainer_kit.telemetry.profile_window import NO_WINDOW, parts

Loop = Callable[[Any, Any, bool], tuple[int, Any]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class TrainingHooks:
    """The functions to call before and after the parts of training loops. They run eagerly, on the host.

    Attributes:
      next_end: Returns the next global step after the given one at which a part ends.
      begin: Called before a part with the global step.
      end: Called after a part with the global step and the results of the loop so far, as NumPy values; returns whether
        the loop goes on.
    """

    next_end: Callable[[int], int]
    begin: Callable[[int], None]
    end: Callable[[int, Any], bool]


class LoopParts:
    """Runs the loops of a trainer in one or several calls; the results do not depend on the number of calls.

    The first step of a new loop function is a separate call: it includes tracing, compiling and usually the longest
    wait for data. For a loop with an attribute `fuse_steps`, the first call has that number of steps, since stops come
    only between programs.

    Args:
      step: A function that returns the global step; called only when there may be work between two steps.
      on_ready: A function that is called when the first step of a new loop function is done.

    Attributes:
      window: The steps to trace for a profile.
      hooks: The functions to call around parts of each loop; None: a loop has no such parts.
      ready_at: The time.perf_counter() at the end of the first step of the newest loop function; 0 before that.
      waited: The seconds that the last loop waited for batches, without the first step of a new loop function; None if
        the loop function does not measure them.
      results: The results of the last loop; None if the loop did not read them, or they were taken.
      tracing: The seconds that the last loop needed to start and write a profiler trace.
    """

    def __init__(self, step: Callable[[], int], on_ready: Callable[[], None] = lambda: None) -> None:
        self.window, self.ready_at = NO_WINDOW, 0.0
        self.hooks: TrainingHooks | None = None
        self.waited: float | None = None
        self.tracing = 0.0
        self.results: Any = None
        self._step, self._on_ready = step, on_ready
        self._known: Loop | None = None

    def run(
        self, loop: Loop, iterator: Any, num_steps: Any, fresh: bool, context: Context = contextlib.nullcontext
    ) -> int:
        """Runs `loop(iterator, num_steps, fresh)` in one or several calls, and returns the number of steps done.

        Args:
          loop: The loop function. If it ends before `num_steps`, a stop was requested, and it is not called again. Its
            attribute `waited`, if any, is the seconds that its last call waited for batches.
          iterator: The iterator for the loop.
          num_steps: The number of steps: an integer or a scalar tensor.
          fresh: Whether the loop resets its metrics first; calls after the first one never do.
          context: Returns a context for each call of the loop. What is done between two calls is outside of it.

        Raises:
          Exception: any error of the loop; the steps before the error have been done.
        """
        self.tracing, self.results = 0.0, None  # and so it stays when the data ends inside the loop
        if self.window.passed and loop is self._known and self.hooks is None:
            with context():
                done, self.results = loop(iterator, num_steps, fresh)
            self.waited = getattr(loop, "waited", None)
            return done
        return self._in_parts(loop, iterator, int(num_steps), fresh, context)

    def _in_parts(self, loop: Loop, iterator: Any, num_steps: int, fresh: bool, context: Context) -> int:
        step, done, waited, results = self._step(), 0, 0.0, None
        for part in self._lengths(loop, step, num_steps):
            self._trace(self.window.before, step + done, step + done + part)
            if self.hooks is not None:
                self.hooks.begin(step + done)
            with context():
                count, results = loop(iterator, part, fresh and done == 0)
            done += count
            if loop is self._known:
                waited += getattr(loop, "waited", None) or 0.0
            else:
                self._known, self.ready_at = loop, time.perf_counter() - self.tracing
                self._on_ready()
            self._trace(self.window.after, step + done)
            if count < part or (self.hooks is not None and not self.hooks.end(step + done, results)):
                break
        self.waited = None if getattr(loop, "waited", None) is None else waited
        self.results = results
        return done

    def _lengths(self, loop: Loop, step: int, num_steps: int) -> Iterator[int]:
        """Yields the number of steps of each call of the loop."""
        cuts = [*self.window.cuts(), *([] if loop is self._known else [step + getattr(loop, "fuse_steps", 1)])]
        for part in parts(step, num_steps, cuts):
            end = step + part
            while step < end:
                begin, step = step, end if self.hooks is None else min(end, self.hooks.next_end(step))
                yield step - begin

    def _trace(self, action: Callable[..., None], *steps: int) -> None:
        begin = time.perf_counter()
        action(*steps)
        self.tracing += time.perf_counter() - begin
