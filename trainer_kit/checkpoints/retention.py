"""Chooses the older checkpoints that rotation keeps besides the newest ones. Pure, but for the times of checkpoints.

The choice depends only on the checkpoints that are there, so a run that was killed keeps the same ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from trainer_kit.checkpoints.commit import read_record
from trainer_kit.config.schema.durations import exact_steps, seconds_of


def choose_by(interval: int | str | None, folder: str) -> Callable[[Sequence[int]], set[int]] | None:
    """Returns a function that chooses the older checkpoints to keep by their steps; None if none are kept.

    Args:
      interval: The value of trainer.keep_interval: steps, or a time.
      folder: The folder of the checkpoints.
    """
    if interval is None:
        return None
    if isinstance(interval, int):
        return functools.partial(kept_by_steps, interval)
    return functools.partial(kept_by_time, folder, seconds_of(interval))


def kept_by_steps(interval: int, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps` at or after each multiple of the interval.

    Args:
      interval: The steps between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    kept, last = set[int](), 0
    exact = exact_steps(interval)
    for step in sorted(steps):
        if step // exact > last // exact:
            kept.add(step)
            last = step
    return kept


def kept_by_time(folder: str, seconds: float, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps`, and each one that was saved `seconds` or more after the last kept one.

    Args:
      folder: The folder of the checkpoints.
      seconds: The seconds between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    kept, last = set[int](), -float("inf")
    for step in sorted(steps):
        prefix = os.path.join(folder, f"ckpt-{step}")
        if not os.path.exists(f"{prefix}.index"):
            continue
        saved = (read_record(prefix) or {}).get("time") or os.path.getmtime(f"{prefix}.index")
        if saved >= last + seconds:
            kept.add(step)
            last = saved
    return kept
