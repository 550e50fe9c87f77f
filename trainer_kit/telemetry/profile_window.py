"""Decides which steps of a run are traced for a profile. Pure: the caller passes the functions that trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from trainer_kit.errors import UsageError


@dataclass(frozen=True)
class ProfileSteps:
    """The steps from `first` to `last`, both included; step 1 is the one that takes global_step from 0 to 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def profile_steps(text: str) -> ProfileSteps:
    """Returns the steps that "10:20" names: 10, 20 and those between.

    Raises:
      UsageError: when the text is not a window of steps.
    """
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text, re.ASCII)
    if found is None:
        raise UsageError(f"{text!r} is not a window of steps; write the first and the last step, as in 10:20")
    first, last = int(found[1]), int(found[2])
    if first < 1:
        raise UsageError(f"{text!r} begins at step {first}, but the first step of a run is 1")
    if last < first:
        raise UsageError(f"{text!r} ends before it begins; write the first step, then the last one, as in 10:20")
    return ProfileSteps(first, last)


class ProfileWindow:
    """Starts a trace before the first of its steps and stops it after the last one; on every worker alike.

    Args:
      steps: The steps to trace.
      start: Starts a trace and returns whether it succeeded.
      stop: Ends a trace that was started.

    Attributes:
      passed: Whether the run has reached the end of the window, after which nothing is left to do.
      started: Whether a trace was started.
    """

    def __init__(self, steps: ProfileSteps, start: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.steps, self._start, self._stop = steps, start, stop
        self.passed, self.started, self._tried, self._open = False, False, False, False

    def cuts(self) -> list[int]:
        """Returns the global steps at which one call of a loop must end and the next begin."""
        return [] if self.passed else [self.steps.first - 1, self.steps.last]

    def before(self, step: int, end: int) -> None:
        """Starts the trace if needed; call it before the steps that take global_step from `step` to `end`."""
        if not self._tried and step < self.steps.last and end >= self.steps.first:
            self._tried = True
            self.started = self._open = self._start()

    def after(self, step: int) -> None:
        """Ends the trace if needed; call it when global_step has reached `step`."""
        if step >= self.steps.last:
            self.passed = True
            self.close()

    def close(self) -> None:
        """Ends the trace if one is open; a second call does nothing."""
        if self._open:
            self._open = False
            self._stop()


NO_WINDOW = ProfileWindow(ProfileSteps(0, 0), start=lambda: False, stop=lambda: None)
NO_WINDOW.after(0)


def parts(step: int, num_steps: int, cuts: list[int]) -> list[int]:
    """Returns the number of steps of each call into which a loop of `num_steps` is split.

    Args:
      step: The global step before the loop.
      num_steps: The number of steps of the loop.
      cuts: The global steps at which one call ends and the next begins, if they lie inside the loop.
    """
    ends = [*sorted({cut - step for cut in cuts if 0 < cut - step < num_steps}), num_steps]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
