"""Removes older checkpoints of a folder, and chooses those that stay besides the newest ones.

The choice depends only on the checkpoints that exist, so a run that was killed keeps the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from trainer_kit.checkpoint_names import (
    RECORD_SUFFIX,
    complete_checkpoints,
    parse_checkpoint_name,
    parse_step,
)
from trainer_kit.checkpoints.commit import is_saved_by_run, read_commit_record, remove_checkpoint
from trainer_kit.checkpoints.pointer_file import write_pointer
from trainer_kit.config.schema.durations import get_seconds, is_due
from trainer_kit.process.sidecar_lease import LeaseReader


class Retention:
    """Protects checkpoints that sidecars need, and those of trainer.keep_interval.

    Args:
      folder: The folder of the checkpoints.
      leases: The leases of the run's sidecars.
      interval: The value of trainer.keep_interval, which is a number of steps or a time. None keeps
        no older checkpoints.
    """

    def __init__(self, folder: str, leases: LeaseReader, interval: int | str | None = None) -> None:
        self._folder = folder
        self._leases = leases
        self._interval = interval

    def protected_steps(self, steps: Sequence[int]) -> set[int]:
        """Returns those of `steps` that have to stay.

        Args:
          steps: The steps of checkpoints that rotation is about to remove.
        """
        needed = self._leases.select_protected_steps(steps)
        if self._interval is None:
            return needed
        if isinstance(self._interval, int):
            return needed | first_of_each_interval(self._interval, steps)
        seconds = get_seconds(self._interval)
        return needed | first_of_each_period(self._folder, seconds, steps)


def remove_old_checkpoints(
    folder: str, keep: int, run_id: str, retention: Retention | None = None
) -> None:
    """Removes all but the newest checkpoints of a run.

    Pinned and protected ones, and those of other runs, stay. Runs in any thread.

    Args:
      folder: The folder of the checkpoints.
      keep: The number of newest checkpoints to keep.
      run_id: The run's identity. For "" any checkpoint with a record counts as its own.
      retention: Protects older checkpoints.

    Raises:
      StorageError: when the pointer file cannot be written.
      OSError: when a file cannot be removed.
    """
    checkpoints = complete_checkpoints(folder)
    own_steps = []
    for step, prefix in checkpoints.items():
        if is_saved_by_run(prefix, run_id):
            own_steps.append(step)
    old_count = max(0, len(own_steps) - keep)
    old_steps = []
    for step in own_steps[:old_count]:
        pin_path = f"{checkpoints[step]}.pin"
        if not os.path.exists(pin_path):
            old_steps.append(step)

    protected_steps: set[int] = set()
    if retention is not None:
        protected_steps = retention.protected_steps(old_steps)

    # The pointer file first, since a missing file of a listed checkpoint counts as damage.
    remaining = {
        step: prefix
        for step, prefix in checkpoints.items()
        if step not in old_steps or step in protected_steps
    }
    prefixes = list(remaining.values())
    write_pointer(folder, prefixes)
    remove_checkpoints_except(folder, remaining, run_id)


def remove_checkpoints_except(folder: str, keep: Collection[int], run_id: str = "") -> None:
    """Removes the checkpoints of a run except pinned ones and those of the steps `keep`.

    Those of other runs stay. The pointer file must no longer list what is removed, since a missing
    file of a listed checkpoint counts as damage. Runs in any thread.

    Args:
      folder: The folder of the checkpoints.
      keep: The steps to keep.
      run_id: The run's identity. For "" any checkpoint with a record counts as its own.

    Raises:
      OSError: when a file cannot be removed.
    """
    checkpoints = [
        name.removesuffix(RECORD_SUFFIX)
        for name in os.listdir(folder)
        if parse_checkpoint_name(name) and name.endswith(RECORD_SUFFIX)
    ]
    for checkpoint in sorted(checkpoints, key=parse_step):
        if parse_step(checkpoint) in keep:
            continue
        prefix = os.path.join(folder, checkpoint)
        pin_path = f"{prefix}.pin"
        is_pinned = os.path.exists(pin_path)
        if not is_pinned and is_saved_by_run(prefix, run_id):
            remove_checkpoint(prefix)


def first_of_each_interval(interval: int, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps` at or after each multiple of the interval.

    Args:
      interval: The steps between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    selected_steps = set[int]()
    last_step = 0
    for step in sorted(steps):
        if is_due(last_step, step, interval):
            selected_steps.add(step)
            last_step = step
    return selected_steps


def first_of_each_period(folder: str, seconds: float, steps: Sequence[int]) -> set[int]:
    """Returns the first of `steps`, and each that was saved a period after the last selected one.

    Args:
      folder: The folder of the checkpoints.
      seconds: The seconds between kept checkpoints.
      steps: The steps of the checkpoints that are not among the newest, in any order.
    """
    selected_steps = set[int]()
    last_time = -float("inf")
    for step in sorted(steps):
        name = f"ckpt-{step}"
        prefix = os.path.join(folder, name)
        index_path = f"{prefix}.index"
        if not os.path.exists(index_path):
            continue
        # A copy of the folder keeps the time in the record.
        record = read_commit_record(prefix) or {}
        recorded_time = record.get("time")
        save_time = recorded_time or os.path.getmtime(index_path)
        if save_time >= last_time + seconds:
            selected_steps.add(step)
            last_time = save_time
    return selected_steps
