"""Goodput: the share of a run's time that was spent on training steps that count.

It covers all attempts of a run: the first start, and each start after a stop or a kill. It is read
from the files of the run. This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer_kit import files
from trainer_kit.process.run_lock import read_heartbeat
from trainer_kit.telemetry.metrics_jsonl import read_active_history, superseded_path
from trainer_kit.telemetry.time_ledger import percent


@dataclass(frozen=True)
class Goodput:
    """How a run has spent its time and its steps, over all of its attempts.

    Only reported steps are counted. If a kill cuts a loop short, its steps are not counted, and its
    time is neither training nor lost. An attempt begins when it locks the folder of the run, after
    its imports. It ends with its last heartbeat, which is at most 5 seconds before a kill. Steps in
    between count twice: as training, and in the wait for the next attempt.

    Attributes:
      attempts: The number of attempts.
      steps: The number of steps that count.
      lost_steps: The number of steps that were trained again, after a kill or a rollback.
      seconds: The time from the first start to the end, without the time between the end of a
        finished run and its continuation.
      training_seconds: The time of the steps that count, with their wait for data.
      lost_seconds: The time of the lost steps.
      waiting_seconds: The time between an attempt that did not finish and the next one.
    """

    attempts: int
    steps: int
    lost_steps: int
    seconds: float
    training_seconds: float
    lost_seconds: float
    waiting_seconds: float

    @property
    def share(self) -> float:
        """The goodput: the share of the time in steps that count, from 0 to 1."""
        return self.training_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"goodput: {percent(self.share)} of {self.seconds:.1f} s trained the {self.steps} steps"
            f" that count; {self.attempts} attempts, {self.lost_steps} steps trained again"
            f" ({self.lost_seconds:.1f} s), {self.waiting_seconds:.1f} s between attempts"
        )


def read_goodput(model_dir: str | os.PathLike[str], now: datetime | None = None) -> Goodput | None:
    """Returns the goodput of the run in `model_dir`.

    Returns None if the folder has no heartbeat of a run, or if its files are damaged.

    Args:
      model_dir: The folder of the run.
      now: The current time, with a time zone, if the last attempt is still running. None means that
        it ends with its last heartbeat.

    Raises:
      StorageError: when a file cannot be read.
    """
    heartbeat: Any = read_heartbeat(model_dir)
    if heartbeat is None:
        return None
    # A value of another type may be in the place of any value of a file.
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
        return _compute_goodput(Path(model_dir), heartbeat, now)
    return None


def _compute_goodput(model_dir: Path, heartbeat: Any, now: datetime | None) -> Goodput:
    attempts = [*heartbeat.get("earlier", ()), heartbeat]
    begins = [datetime.fromisoformat(attempt["started"]) for attempt in attempts]
    ends = [datetime.fromisoformat(attempt["beat"]) for attempt in attempts]
    ends[-1] = now or ends[-1]

    lifetime = ends[-1] - begins[0]
    seconds = lifetime.total_seconds()
    waiting_seconds = 0.0
    for attempt, end, next_begin in zip(attempts, ends, begins[1:], strict=False):
        # The clock may have gone back between two attempts.
        pause = max(0.0, (next_begin - end).total_seconds())
        if attempt["ended"] == "done":
            seconds -= pause
        else:
            waiting_seconds += pause

    metrics_path = model_dir / "metrics.jsonl"
    # A kill while lines are moved there leaves some of them twice.
    superseded_lines = files.read_json_lines(superseded_path(metrics_path))
    superseded = {str(record): record for record in superseded_lines}
    steps, training_seconds = _sum_loops(read_active_history(metrics_path))
    lost_steps, lost_seconds = _sum_loops(superseded.values())
    return Goodput(
        attempts=len(attempts),
        steps=steps,
        lost_steps=lost_steps,
        seconds=seconds,
        training_seconds=training_seconds,
        lost_seconds=lost_seconds,
        waiting_seconds=waiting_seconds,
    )


def _sum_loops(records: Iterable[Mapping[str, Any]]) -> tuple[int, float]:
    """Returns the steps and the seconds of the training loops among the lines of a history."""
    steps = 0
    seconds = 0.0
    for record in records:
        rate = record.get("steps_per_second")
        if record.get("kind") == "train" and rate is not None:
            steps += round(rate * record["seconds"])
            seconds += record["seconds"]
    return steps, seconds
