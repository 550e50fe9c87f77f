"""Goodput: the share of a run's time that went into training steps that count.

It covers all attempts of a run: the first start, and each start after a stop or a kill. It is read
from the files of the run. This module does not import TensorFlow.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainer_kit import files
from trainer_kit.process.run_lock import read_heartbeat
from trainer_kit.telemetry.metrics_jsonl import read_active_history, superseded_path
from trainer_kit.telemetry.time_ledger import percent


@dataclass(frozen=True)
class Goodput:
    """What became of the time and the steps of a run, over all of its attempts.

    Steps are counted as far as they were reported. Those of a loop that a kill has cut short are
    not among them, and its time is neither training nor lost. A killed attempt ends with its last
    heartbeat, up to 5 seconds before the kill.

    Attributes:
      attempts: The number of processes that have trained or prepared to train.
      steps: The steps that count.
      lost_steps: The steps that were trained again, after a kill or a rollback.
      seconds: The time from the first start to the last sign of life. The time after an attempt
        that had finished its run is left out.
      training_seconds: The time of the steps that count, with their wait for data.
      lost_seconds: The time of the lost steps.
      waiting_seconds: The time between attempts.
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
        if self.seconds <= 0:
            return 0.0
        return self.training_seconds / self.seconds

    def __str__(self) -> str:
        return (
            f"goodput: {percent(self.share)} of {self.seconds:.1f} s trained the {self.steps} steps"
            f" that count; {self.attempts} attempts, {self.lost_steps} steps trained again"
            f" ({self.lost_seconds:.1f} s), {self.waiting_seconds:.1f} s between attempts"
        )


def read_goodput(model_dir: str | os.PathLike[str], now: datetime | None = None) -> Goodput | None:
    """Returns the goodput of the run in `model_dir`. None if the folder has no heartbeat of a run.

    Args:
      model_dir: The folder of the run.
      now: The time at which the current attempt is known to live, with a time zone. None: its last
        heartbeat.

    Raises:
      StorageError: when a file cannot be read.
    """
    heartbeat: Any = read_heartbeat(model_dir)
    if heartbeat is None:
        return None
    attempts = [*heartbeat.get("earlier", ()), heartbeat]
    begin = datetime.fromisoformat(attempts[0]["started"])
    end = now or datetime.fromisoformat(heartbeat["beat"])
    lifetime = end - begin
    seconds = lifetime.total_seconds()

    waiting_seconds = 0.0
    for attempt, next_attempt in itertools.pairwise(attempts):
        attempt_end = datetime.fromisoformat(attempt["beat"])
        next_begin = datetime.fromisoformat(next_attempt["started"])
        pause = (next_begin - attempt_end).total_seconds()
        if attempt["ended"] == "done":
            seconds -= pause
        else:
            waiting_seconds += pause

    metrics_path = os.path.join(model_dir, "metrics.jsonl")
    steps, training_seconds = _sum_loops(read_active_history(metrics_path))
    superseded = files.read_json_lines(superseded_path(metrics_path))
    lost_steps, lost_seconds = _sum_loops(superseded)
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
