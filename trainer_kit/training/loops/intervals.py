"""Computes the length of the next loop, and which events are due after it. Pure; steps are global steps.

Intervals count from step 0. A loop that crosses a multiple of an interval makes the event due once, at the loop's end.
So the events of a resumed run happen at the same steps as those of a run that was never stopped. An interval may be a
fraction of steps, such as an epoch of 10.3 steps; the first step that reaches a multiple counts as that multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer_kit.config.schema.durations import Interval, exact_steps

StepsPerLoop = int | Callable[[int], int]


def is_due(before: int, after: int, interval: Interval) -> bool:
    """Whether the steps from `before` (excluded) to `after` (included) hold a multiple of `interval`."""
    steps = exact_steps(interval)
    return after // steps > before // steps


def next_multiple(step: int, interval: Interval) -> int:
    """Returns the first multiple of `interval` above `step`, rounded up to a whole step."""
    steps = exact_steps(interval)
    return math.ceil((step // steps + 1) * steps)


def loop_length(step: int, target: int | None, steps_per_loop: StepsPerLoop) -> int:
    """Returns the number of steps in the next loop.

    Args:
      step: The current global step.
      target: The global step to reach; None: there is none.
      steps_per_loop: A number, or a function of the global step.

    Raises:
      ValueError: when `steps_per_loop` is a function that returns a number below 1.
    """
    wanted = steps_per_loop(step) if callable(steps_per_loop) else steps_per_loop
    if wanted < 1:
        raise ValueError(f"steps_per_loop returned {wanted} at step {step}; return at least 1")
    return wanted if target is None else min(wanted, target - step)


def next_stop(step: int, target: int | None, *intervals: Interval | None) -> int | None:
    """Returns the step at which training pauses next, a multiple of an interval or `target`; None: it does not.

    Args:
      step: The current global step.
      target: The global step to reach; None: there is none.
      *intervals: The steps between pauses; None: no pauses.
    """
    pauses = [next_multiple(step, interval) for interval in intervals if interval]
    return min(pauses if target is None else [*pauses, target], default=None)
