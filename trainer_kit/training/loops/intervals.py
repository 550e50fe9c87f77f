"""Steps of loops, intervals and epochs, as numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from trainer_kit.config.schema.durations import Interval, get_exact_steps, is_due

StepsPerLoop = int | Callable[[int], int]


def next_multiple(step: int, interval: Interval) -> int:
    """Returns the first multiple of `interval` above `step`, rounded up to a whole step."""
    steps = get_exact_steps(interval)
    multiple = step // steps + 1
    return math.ceil(multiple * steps)


def loop_length(step: int, target: int | None, steps_per_loop: StepsPerLoop) -> int:
    """Returns the number of steps in the next loop.

    Args:
      step: The current global step.
      target: The global step to reach. None if there is none.
      steps_per_loop: A number, or a function of the global step that returns one.

    Raises:
      ValueError: when `steps_per_loop` is a function that returns a number below 1.
    """
    num_steps = steps_per_loop(step) if callable(steps_per_loop) else steps_per_loop
    if num_steps < 1:
        raise ValueError(f"steps_per_loop returned {num_steps} at step {step}; return at least 1")
    if target is None:
        return num_steps
    remaining_steps = target - step
    return min(num_steps, remaining_steps)


def next_stop(step: int, target: int | None, *intervals: Interval | None) -> int | None:
    """Returns the step at which training pauses next. None if it does not pause.

    This is a multiple of an interval, or `target`.

    Args:
      step: The current global step.
      target: The global step to reach. None if there is none.
      *intervals: The steps between pauses. None means no pauses.
    """
    pauses = [next_multiple(step, interval) for interval in intervals if interval]
    if target is not None:
        pauses.append(target)
    return min(pauses, default=None)


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run, counted from 1. Epoch e ends with step ceil(e * steps).

    Attributes:
      steps: The steps of an epoch. It is a fraction if batches run over the ends of epochs.
    """

    steps: Fraction

    def get_end_step(self, epoch: int | Fraction) -> int:
        """Returns the global step that ends an epoch, or a part of one. 0 for epoch 0."""
        return math.ceil(epoch * self.steps)

    def count_completed(self, step: int) -> int:
        """Returns the number of epochs that have ended after `step` steps."""
        return int(step // self.steps)

    def is_end(self, step: int) -> bool:
        """Whether an epoch ends with this step."""
        return step > 0 and is_due(step - 1, step, self.steps)

    def locate_step(self, step: int) -> tuple[int, int]:
        """Returns the epoch of step number `step`, and its number in that epoch.

        Both count from 1. Step 0 gives (1, 0).
        """
        # A step that ends an epoch still belongs to it.
        previous = max(0, step - 1)
        completed = self.count_completed(previous)
        begin = self.get_end_step(completed)
        epoch = completed + 1
        return epoch, step - begin


class LoopRange(NamedTuple):
    """The steps that a training loop is to take.

    Attributes:
      begin: The global step before the loop.
      end: The global step at its end.
    """

    begin: int
    end: int


class InterruptedLoop:
    """The range of a loop that a stop interrupted. Checkpoints contain it.

    Attributes:
      steps: The range. None when no loop was interrupted.
    """

    def __init__(self) -> None:
        self.steps: LoopRange | None = None

    def next(self, step: int, target: int | None, steps_per_loop: StepsPerLoop) -> LoopRange:
        """Returns the range of the loop to run at `step`.

        An interrupted loop continues: its begin is before `step`.

        Args:
          step: The current global step.
          target: The global step to reach. None if there is none.
          steps_per_loop: A number, or a function of the global step that returns one.

        Raises:
          ValueError: when `steps_per_loop` is a function that returns a number below 1.
        """
        if self.steps is None:
            num_steps = loop_length(step, target, steps_per_loop)
            return LoopRange(step, step + num_steps)

        # The target may have changed since the stop.
        begin, end = self.steps
        if target is not None:
            end = min(end, target)
        return LoopRange(begin, end)

    def state(self) -> list[int] | None:
        """Returns the state for a checkpoint. None when no loop was interrupted."""
        if self.steps:
            return list(self.steps)
        return None

    def restore(self, state: list[int] | None) -> None:
        """Restores the state of a checkpoint."""
        self.steps = LoopRange(state[0], state[1]) if state else None
