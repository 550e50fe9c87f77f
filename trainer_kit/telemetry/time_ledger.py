"""Measures how a run spends its wall time: a stopwatch that always counts for one name.

Pure, without TensorFlow.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIME_CATEGORIES = (
    "start",
    "input",
    "step",
    "callbacks",
    "evaluation",
    "save",
    "report",
    "recovery",
    "trace",
)
# Phases that are reported under another name.
_PHASE_TO_CATEGORY = {
    "train": "step",
    "evaluate": "evaluation",
}
# The name for time outside of all names.
_UNACCOUNTED = ""


class TimeLedger:
    """Sums up the time of the thread that created it by name, beginning with "start".

    Every moment counts once, for the innermost name. The account also shows time outside of all
    names. Entering and leaving a name reads the clock twice, which takes a few microseconds.

    Args:
      clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._owner = threading.get_ident()
        self._begin_time = clock()
        self._last_switch_time = self._begin_time
        self._category = TIME_CATEGORIES[0]
        self._seconds: dict[str, float] = {}
        self._input_seconds: float | None = None
        self._steps = 0
        self._evaluations = 0
        self._first_evaluation_seconds = 0.0

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Counts the time inside for `name`. Does nothing in another thread.

        Args:
          name: A phase of the run, one of TIME_CATEGORIES, or any other row of the account.
        """
        # During a late save in another thread, the main thread's time counts.
        if threading.get_ident() != self._owner:
            yield
            return

        previous_name = self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(previous_name)
            if name == "evaluate":
                self._evaluations += 1
                if not self._first_evaluation_seconds:
                    self._first_evaluation_seconds = self._seconds[name]

    def end_start(self) -> None:
        """Ends the name "start". A second call does nothing."""
        if self._category == TIME_CATEGORIES[0]:
            self._switch_to(_UNACCOUNTED)

    def add_loop(self, steps: int, input_seconds: float | None, first_seconds: float) -> None:
        """Splits the seconds of a training loop, which were counted for "train".

        Args:
          steps: The number of finished steps.
          input_seconds: The seconds that the steps waited for their batches. None if not known.
          first_seconds: The seconds until the first step was done, if the loop had to be built for
            it. 0 or less otherwise.
        """
        self._steps += steps
        self._move("train", TIME_CATEGORIES[0], first_seconds)
        if input_seconds is not None:
            moved_seconds = self._move("train", "input", input_seconds)
            self._input_seconds = (self._input_seconds or 0.0) + moved_seconds

    def build_account(self) -> TimeAccount:
        """Returns the account up to now. Counting continues."""
        self._switch_to(self._category)
        seconds_by_name = dict.fromkeys(TIME_CATEGORIES, 0.0)
        for name, seconds in self._seconds.items():
            if name != _UNACCOUNTED:
                row = _PHASE_TO_CATEGORY.get(name, name)
                seconds_by_name[row] = seconds_by_name.get(row, 0.0) + seconds
        if self._input_seconds is None:
            del seconds_by_name["input"]
        return TimeAccount(
            seconds_by_name,
            self._last_switch_time - self._begin_time,
            self._steps,
            self._evaluations,
            self._first_evaluation_seconds,
        )

    def _switch_to(self, name: str) -> str:
        """Ends the current name, begins to count for `name`, and returns the old name."""
        now = self._clock()
        old_name = self._category
        seconds = self._seconds.get(old_name, 0.0)
        self._seconds[old_name] = seconds + now - self._last_switch_time
        self._category = name
        self._last_switch_time = now
        return old_name

    def _move(self, source: str, target: str, seconds: float) -> float:
        """Moves at most `seconds` from one name to another, and returns the moved seconds."""
        source_seconds = self._seconds.get(source, 0.0)
        moved_seconds = min(max(seconds, 0.0), source_seconds)
        if moved_seconds:
            self._seconds[source] -= moved_seconds
            target_seconds = self._seconds.get(target, 0.0)
            self._seconds[target] = target_seconds + moved_seconds
        return moved_seconds


@dataclass(frozen=True)
class TimeAccount:
    """The account of a TimeLedger, in seconds.

    Attributes:
      seconds: The seconds by name. "input" is missing if the wait for data is not known, and "step"
        then includes it.
      wall: The seconds since the ledger was created.
      steps: The number of training steps.
      evaluations: The number of evaluations.
      first_evaluation_seconds: The seconds of the first evaluation, which includes its tracing.
    """

    seconds: Mapping[str, float]
    wall: float
    steps: int = 0
    evaluations: int = 0
    first_evaluation_seconds: float = 0.0

    @property
    def unaccounted_seconds(self) -> float:
        """The seconds outside of all names."""
        accounted_seconds = sum(self.seconds.values())
        return max(0.0, self.wall - accounted_seconds)

    def share(self, name: str) -> float:
        """Returns the share of `name` in the wall time, from 0 to 1."""
        if self.wall <= 0:
            return 0.0
        return self.seconds.get(name, 0.0) / self.wall

    def to_record(self) -> dict[str, Any]:
        """Returns the account for final.json, in seconds rounded to the millisecond."""
        seconds = {"seconds": self.wall, **self.seconds, "unaccounted": self.unaccounted_seconds}
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        return {**rounded, "steps": self.steps}

    def format_shares(self) -> str:
        """Returns the shares as text, the largest first, without those below half a percent.

        For example "61.2 s: step 70 %, start 16 %, input 9 %, save 4 %, unaccounted 1 %".
        """
        step_name = "step" if "input" in self.seconds else "step with its input"
        rows = []
        for name, seconds in self.seconds.items():
            row_name = step_name if name == "step" else name
            rows.append((row_name, seconds))
        rows.sort(key=lambda row: -row[1])
        rows.append(("unaccounted", self.unaccounted_seconds))

        parts = []
        for name, seconds in rows:
            if seconds >= 0.005 * self.wall > 0:
                share = seconds / self.wall
                parts.append(f"{name} {percent(share)}")
        shares = ", ".join(parts)
        return f"{self.wall:.1f} s: {shares}"


def percent(share: float) -> str:
    """Returns 0.42 as "42 %"."""
    return f"{100 * share:.0f} %"
