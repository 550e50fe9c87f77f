"""Chooses the older checkpoints that rotation keeps besides the newest ones. Pure, but for the times of checkpoints.

The choice depends only on the checkpoints that are there, so a run that was killed keeps the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer_kit.checkpoints.commit import read_record
from trainer_kit.config.run_length import Interval


def kept_by_steps(interval: Interval, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps` at or after each multiple of the interval.

    Args:
      interval: The steps between kept checkpoints; a fraction for epochs.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    kept, last = set[int](), 0
    for step in sorted(steps):
        if step // interval > last // interval:
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
