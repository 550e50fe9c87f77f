"""Decides what follows the end of a supervised process: whether and when it runs again, by its exit code.

The functions are pure: they neither wait nor start processes.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from trainer_kit.errors import ExitCode


class Decision(enum.Enum):
    """What follows an exit code."""

    END = "end"
    RESTART = "restart at once, not counted"
    RETRY = "restart after a wait, counted"


# The cause of the end in a word or two, and what follows. Death by a signal and all other codes are crashes.
OUTCOMES: dict[ExitCode, tuple[str, Decision]] = {
    ExitCode.DONE: ("done", Decision.END),
    ExitCode.BUG: ("crashed", Decision.RETRY),
    ExitCode.USAGE: ("usage", Decision.END),
    ExitCode.DIVERGED: ("diverged", Decision.END),
    ExitCode.MODEL_DIR_IN_USE: ("model_dir in use", Decision.END),
    ExitCode.DATA: ("data", Decision.END),
    ExitCode.STORAGE: ("storage", Decision.END),
    ExitCode.STALLED: ("stalled", Decision.RETRY),
    ExitCode.NOTHING_TO_WAIT_FOR: ("nothing to wait for", Decision.END),
    ExitCode.PREEMPTED: ("preempted", Decision.RESTART),
    ExitCode.INTERRUPTED: ("interrupted", Decision.END),
}


def outcome(code: int) -> tuple[str, Decision]:
    """Returns the cause and the decision for an exit code; a negative code is minus the number of a signal."""
    if code in OUTCOMES:
        return OUTCOMES[ExitCode(code)]
    if code >= 0:
        return f"crashed with exit code {code}", Decision.RETRY
    try:
        return f"killed by {signal.Signals(-code).name}", Decision.RETRY
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}", Decision.RETRY


def backoff(number: int, first: float, most: float) -> float:
    """Returns the seconds before restart `number`, from 1: `first`, then twice as long each time, up to `most`."""
    return min(most, first * 2.0 ** min(number - 1, 100))


@dataclass(frozen=True)
class Verdict:
    """The decision after an attempt.

    Attributes:
      restart: Whether there is another attempt.
      seconds: The seconds to wait before it.
      text: The decision and its reason, for the log.
    """

    restart: bool
    seconds: float
    text: str


class Policy:
    """Decides after each attempt whether there is another one.

    Args:
      max_restarts: The number of restarts after crashes and stalls.
      first: The first wait, in seconds.
      most: The longest wait, in seconds.
    """

    def __init__(self, max_restarts: int, first: float, most: float) -> None:
        self._max_restarts = max_restarts
        self._first = first
        self._most = most
        self._crashed_at: list[tuple[int | None, bool]] = []  # steps, and whether they can be compared
        self._furthest = -1
        self._fruitless = 0  # crashes since the last one that reached a later step than all before
        self._idle = 0  # preemptions in a row that gained no step

    def after(self, code: int, step: int | None, *, seconds: float = 0.0, silent: bool = False) -> Verdict:
        """Returns the decision after an attempt.

        Args:
          code: The exit code of the attempt.
          step: The step that it reached; None: it ended before its first step was known.
          seconds: The seconds that it lasted.
          silent: Whether the command never reports steps, so that a `step` of None means nothing. Then an attempt that
            lasted longer than the longest wait counts as progress, and no two crashes are at the same step.
        """
        decision = outcome(code)[1]
        silent = silent and step is None
        reached = -1 if step is None else step
        gained = seconds > self._most if silent else reached > self._furthest
        self._furthest = max(self._furthest, reached)
        if decision is Decision.RESTART:
            return self._after_preemption(gained, step)
        if decision is not Decision.RETRY:
            return Verdict(False, 0.0, "end")
        # SIGKILL comes from outside and leaves a heartbeat that is seconds old, so its step cannot be compared.
        return self._after_crash(step, gained, comparable=code != -signal.SIGKILL and not silent)

    def _after_preemption(self, gained: bool, step: int | None) -> Verdict:
        self._idle = 0 if gained else self._idle + 1
        if not self._idle:
            return Verdict(True, 0.0, "restart at once")
        seconds = backoff(self._idle, self._first, self._most)
        reason = "its step is not known" if step is None else f"no step after {self._furthest} was reached"
        return Verdict(True, seconds, f"restart in {seconds:g} s: {reason}")

    def _after_crash(self, step: int | None, gained: bool, comparable: bool) -> Verdict:
        again = comparable and self._crashed_at[-1:] == [(step, True)]
        self._crashed_at.append((step, comparable))
        count = len(self._crashed_at)
        if again:
            where = "before its first step" if step is None else f"at step {step}"
            return Verdict(False, 0.0, f"end: the second crash in a row {where}; another attempt would fail there too")
        if count > self._max_restarts:
            return Verdict(False, 0.0, f"end: no restart is left of {self._max_restarts}")
        self._fruitless = 1 if gained else self._fruitless + 1
        seconds = backoff(self._fruitless, self._first, self._most)
        return Verdict(True, seconds, f"restart {count} of {self._max_restarts} in {seconds:g} s")
