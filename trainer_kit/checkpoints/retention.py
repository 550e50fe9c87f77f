"""Removes older checkpoints, and chooses those that stay besides the newest ones.

The choice depends only on the checkpoints that are there, so a run that was killed keeps the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer_kit.checkpoint_names import complete_checkpoints, step_of
from trainer_kit.checkpoints.commit import is_own, read_record, remove_checkpoint
from trainer_kit.checkpoints.pointer_file import write_pointer
from trainer_kit.config.schema.durations import is_due, seconds_of
from trainer_kit.process.sidecar_lease import Leases


class Retention:
    """Protects checkpoints that sidecars need, and those of trainer.keep_interval.

    Args:
      folder: The folder of the checkpoints.
      leases: The leases of the run's sidecars.
      interval: The value of trainer.keep_interval: steps, or a time; None keeps no older checkpoints.
    """

    def __init__(self, folder: str, leases: Leases, interval: int | str | None = None) -> None:
        self._folder = folder
        self._leases = leases
        self._interval = interval

    def protected_steps(self, steps: Sequence[int]) -> set[int]:
        """Returns those of `steps`, the steps of checkpoints that rotation is about to remove, that have to stay."""
        needed = self._leases.needed(steps)
        if self._interval is None:
            return needed
        if isinstance(self._interval, int):
            return needed | first_of_each_interval(self._interval, steps)
        return needed | first_of_each_period(self._folder, seconds_of(self._interval), steps)


def remove_old_checkpoints(folder: str, keep: int, run_id: str, retention: Retention | None = None) -> None:
    """Removes all but the newest checkpoints of a run; pinned and protected ones, and those of other runs, stay.

    A checkpoint leaves the pointer file before any of its files is removed. Runs in any thread.

    Args:
      folder: The folder of the checkpoints.
      keep: The number of newest checkpoints to keep.
      run_id: The run's identity; for "" any checkpoint with a record counts as its own.
      retention: Protects older checkpoints.

    Raises:
      StorageError: when the pointer file cannot be written.
      OSError: when a file cannot be removed.
    """
    own = [prefix for prefix in complete_checkpoints(folder).values() if is_own(prefix, run_id)]
    old = [prefix for prefix in own[: max(0, len(own) - keep)] if not os.path.exists(f"{prefix}.pin")]
    if retention is not None:
        protected = retention.protected_steps([step_of(prefix) for prefix in old])
        old = [prefix for prefix in old if step_of(prefix) not in protected]
    write_pointer(folder, without=old)
    for prefix in old:
        remove_checkpoint(prefix)


def first_of_each_interval(interval: int, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps` at or after each multiple of the interval.

    Args:
      interval: The steps between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    chosen = set[int]()
    last = 0
    for step in sorted(steps):
        if is_due(last, step, interval):
            chosen.add(step)
            last = step
    return chosen


def first_of_each_period(folder: str, seconds: float, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps`, and each one that was saved `seconds` or more after the last chosen one.

    Args:
      folder: The folder of the checkpoints.
      seconds: The seconds between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    chosen = set[int]()
    last = -float("inf")
    for step in sorted(steps):
        prefix = os.path.join(folder, f"ckpt-{step}")
        if not os.path.exists(f"{prefix}.index"):
            continue
        saved = (read_record(prefix) or {}).get("time") or os.path.getmtime(f"{prefix}.index")
        if saved >= last + seconds:
            chosen.add(step)
            last = saved
    return chosen
