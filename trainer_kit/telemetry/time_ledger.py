"""Where the wall time of a run goes: a stopwatch that always knows what it measures. Pure; no TensorFlow here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("start", "input", "step", "callbacks", "evaluation", "save", "report", "recovery", "trace")
_TOLD_AS = {"train": "step", "evaluate": "evaluation"}  # the phases of a run whose names would say too much or little
_NOTHING = ""  # the name of what has none


class TimeLedger:
    """Sums up, by name, how long the thread that made it does what; from "start" on.

    Every moment counts once, for the innermost name. What lies outside of all is not lost: the account shows it.
    Entering and leaving a name reads the clock twice: a few microseconds.

    Args:
      clock: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._owner = clock, threading.get_ident()
        self._begun = self._since = clock()
        self._name = NAMES[0]
        self._seconds: dict[str, float] = {}
        self._input: float | None = None
        self._steps = self._evaluations = 0
        self._first_evaluation = 0.0

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Counts what is done inside for `name`, a phase of the run or one of NAMES; another thread's not at all."""
        if threading.get_ident() != self._owner:  # a late save: what the main thread is at goes on
            yield
            return
        before = self._turn_to(name)
        try:
            yield
        finally:
            self._turn_to(before)
            if name == "evaluate":
                self._evaluations += 1
                self._first_evaluation = self._first_evaluation or self._seconds[name]

    def end_start(self) -> None:
        """The run is about to do what it is for; a second call does nothing."""
        if self._name == NAMES[0]:
            self._turn_to(_NOTHING)

    def add_loop(
        self, steps: int, input_seconds: float | None, first_seconds: float, tracing_seconds: float = 0.0
    ) -> None:
        """Takes the seconds of a training loop, counted for "train" before, apart.

        Args:
          steps: that it has done.
          input_seconds: that they waited for their batches; None: not known.
          first_seconds: until the first step was done, where the loop had to be built for it; else 0 or less.
          tracing_seconds: that beginning and writing a trace took; they are counted for "trace".
        """
        self._steps += steps
        self._move("train", "trace", tracing_seconds)
        self._move("train", NAMES[0], first_seconds)
        if input_seconds is not None:
            self._input = (self._input or 0.0) + self._move("train", "input", input_seconds)

    def account(self) -> TimeAccount:
        """Returns what was counted up to now; it goes on counting."""
        self._turn_to(self._name)
        told = {_TOLD_AS.get(name, name): seconds for name, seconds in self._seconds.items() if name != _NOTHING}
        told = {**dict.fromkeys(NAMES, 0.0), **told}
        if self._input is None:
            del told["input"]
        return TimeAccount(told, self._since - self._begun, self._steps, self._evaluations, self._first_evaluation)

    def _turn_to(self, name: str) -> str:
        now = self._clock()
        before = self._name
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._name, self._since = name, now
        return before

    def _move(self, source: str, target: str, seconds: float) -> float:
        moved = min(max(seconds, 0.0), self._seconds.get(source, 0.0))
        if moved:
            self._seconds[source] -= moved
            self._seconds[target] = self._seconds.get(target, 0.0) + moved
        return moved


@dataclass(frozen=True)
class TimeAccount:
    """What a TimeLedger has counted, in seconds.

    Attributes:
      seconds: by name. "input" is missing where the wait for data is not known; it is in "step" then.
      wall: since the ledger was made.
      steps: that were trained.
      evaluations: how many there were.
      first_evaluation: what the first of them took; it is traced there.
    """

    seconds: Mapping[str, float]
    wall: float
    steps: int = 0
    evaluations: int = 0
    first_evaluation: float = 0.0

    @property
    def unaccounted(self) -> float:
        """What no name has been found for."""
        return max(0.0, self.wall - sum(self.seconds.values()))

    def share(self, name: str) -> float:
        """Returns the share of the wall time that `name` has, 0 to 1."""
        return self.seconds.get(name, 0.0) / self.wall if self.wall > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """Returns what final.json keeps, in seconds rounded to the millisecond."""
        seconds = {"seconds": self.wall, **self.seconds, "unaccounted": self.unaccounted}
        return {**{name: round(value, 3) for name, value in seconds.items()}, "steps": self.steps}

    def line(self) -> str:
        """Returns the shares as text, the largest first, down to half a per cent.

        For example "61.2 s: step 70 %, start 16 %, input 9 %, save 4 %, unaccounted 1 %".
        """
        step = "step" if "input" in self.seconds else "step with its input"
        named = [(step if name == "step" else name, seconds) for name, seconds in self.seconds.items()]
        shown = [*sorted(named, key=lambda item: -item[1]), ("unaccounted", self.unaccounted)]
        parts = [f"{name} {percent(value / self.wall)}" for name, value in shown if value >= 0.005 * self.wall > 0]
        return f"{self.wall:.1f} s: {', '.join(parts)}"


def percent(share: float) -> str:
    """Returns 0.42 as "42 %"."""
    return f"{100 * share:.0f} %"
