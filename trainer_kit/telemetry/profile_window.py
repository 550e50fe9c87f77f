"""The steps of a run that are traced for a profile. Pure: what a trace is made with is given."""

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
      UsageError: when the text names none.
    """
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text, re.ASCII)
    if found is None:
        raise UsageError(f"{text!r} is no window of steps; write the first and the last one, as in 10:20")
    first, last = int(found[1]), int(found[2])
    if first < 1:
        raise UsageError(f"{text!r} begins at step {first}, and the first step of a run is 1")
    if last < first:
        raise UsageError(f"{text!r} ends before it begins; write the first step, then the last one, as in 10:20")
    return ProfileSteps(first, last)


class ProfileWindow:
    """Starts a trace before the first of its steps and stops it after the last one; on every worker alike.

    Args:
      steps: to be traced.
      start: starts a trace; returns whether it did.
      stop: ends a trace that was started.

    Attributes:
      passed: whether the run has come to the end of the window; there is nothing left to do then.
      started: whether a trace was started.
    """

    def __init__(self, steps: ProfileSteps, start: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.steps, self._start, self._stop = steps, start, stop
        self.passed, self.started, self._tried, self._open = False, False, False, False

    def cuts(self) -> list[int]:
        """Returns the global steps at which no call of a loop may be in its middle."""
        return [] if self.passed else [self.steps.first - 1, self.steps.last]

    def before(self, step: int, end: int) -> None:
        """To be called before the steps that take global_step from `step` to `end`."""
        if not self._tried and step < self.steps.last and end >= self.steps.first:
            self._tried = True
            self.started = self._open = self._start()

    def after(self, step: int) -> None:
        """To be called when global_step has come to `step`."""
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
    """Returns how many steps each of the calls has that a loop of `num_steps` is run in.

    Args:
      step: the global step before the loop.
      num_steps: of the loop.
      cuts: global steps at which one call ends and the next begins, if they lie inside.
    """
    ends = [*sorted({cut - step for cut in cuts if 0 < cut - step < num_steps}), num_steps]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
