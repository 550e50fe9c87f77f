"""Goodput: the share of a run's time that went into training steps that count.

It covers all attempts of a run: the first start, and each start after a stop or a kill. It is read
from the files of the run. This module does not import TensorFlow.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainer_kit import files
from trainer_kit.process.run_directory import read_manifest
from trainer_kit.process.run_lock import read_heartbeat
from trainer_kit.telemetry.metrics_jsonl import RESUME, read_active_history, superseded_path
from trainer_kit.telemetry.time_ledger import percent


@dataclass(frozen=True)
class Goodput:
    """What became of the time and the steps of a run, over all of its attempts.

    A killed attempt ends with its last heartbeat. Those come every 5 seconds, so the numbers may be
    wrong by so much for each kill.

    Attributes:
      attempts: The number of starts that trained or were about to.
      steps: The steps that count: trained, reported and not trained again.
      lost_steps: The steps that were trained again, after a kill or a rollback.
      seconds: The time from the first start to the last sign of life. The time after an attempt
        that had finished its run is left out.
      training_seconds: The time in training loops whose steps count.
      lost_seconds: The time in training loops whose steps were trained again, as far as they were
        reported.
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
        """The goodput: the share of the time in training loops whose steps count, from 0 to 1."""
        return self.training_seconds / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        restarts = self.attempts - 1
        plural = "" if restarts == 1 else "s"
        return (
            f"goodput: {percent(self.share)} of {self.seconds:.1f} s trained the {self.steps} steps"
            f" that count; {restarts} restart{plural}, {self.lost_steps} steps trained again"
            f" ({self.lost_seconds:.1f} s), {self.waiting_seconds:.1f} s between attempts"
        )


@dataclass(frozen=True)
class _Attempt:
    """One process of a run.

    Attributes:
      begin, end: The time of its start and of its last sign of life.
      first_step: The step from which it trained.
      last_step: The step at its last sign of life.
      has_finished: Whether it ended because nothing was left to do.
    """

    begin: datetime
    end: datetime
    first_step: int
    last_step: int
    has_finished: bool


def read_goodput(model_dir: str | os.PathLike[str], now: datetime | None = None) -> Goodput | None:
    """Returns the goodput of the run in `model_dir`.

    Returns None if the folder has no manifest and heartbeat of a run.

    Args:
      model_dir: The folder of the run.
      now: The time at which the current attempt is known to live, with a time zone. None: its last
        heartbeat.

    Raises:
      StorageError: when a file cannot be read.
    """
    attempts = _read_attempts(model_dir, now)
    if not attempts:
        return None
    metrics_path = os.path.join(model_dir, "metrics.jsonl")
    history = read_active_history(metrics_path)
    loops = [record for record in history if record["kind"] == "train"]
    first_step = attempts[0].first_step
    last_step = loops[-1]["step"] if loops else first_step

    # The lines that were superseded follow the step to which the run went back.
    rollbacks: list[tuple[int, int]] = []
    lost_seconds = 0.0
    for record in files.read_json_lines(superseded_path(metrics_path)):
        if record["kind"] == RESUME:
            rollbacks.append((record["step"], record["step"]))
        elif record["kind"] == "train" and rollbacks:
            rollbacks[-1] = (rollbacks[-1][0], record["step"])
            lost_seconds += float(record["seconds"] or 0.0)

    lost_steps = 0
    waiting_seconds = 0.0
    finished_seconds = 0.0
    for attempt, next_attempt in itertools.pairwise(attempts):
        pause = max(0.0, (next_attempt.begin - attempt.end).total_seconds())
        if attempt.has_finished:
            finished_seconds += pause
        else:
            waiting_seconds += pause

        # The last report or the last heartbeat before the kill has the higher step.
        resumed_step = next_attempt.first_step
        reached_step = max(attempt.last_step, resumed_step)
        for rollback in rollbacks:
            if rollback[0] == resumed_step:
                reached_step = max(reached_step, rollback[1])
                rollbacks.remove(rollback)
                break
        lost_steps += reached_step - resumed_step
    # The other rollbacks were inside an attempt.
    lost_steps += sum(reached_step - step for step, reached_step in rollbacks)

    seconds = (attempts[-1].end - attempts[0].begin).total_seconds() - finished_seconds
    return Goodput(
        attempts=len(attempts),
        steps=max(0, last_step - first_step),
        lost_steps=lost_steps,
        seconds=seconds,
        training_seconds=sum(record.get("seconds") or 0.0 for record in loops),
        lost_seconds=lost_seconds,
        waiting_seconds=waiting_seconds,
    )


def _read_attempts(model_dir: str | os.PathLike[str], now: datetime | None) -> list[_Attempt]:
    """Returns the attempts that the manifest records, from the heartbeats of their processes.

    Processes that ended before they were recorded, since nothing was left to do or their model
    could not be built, are left out.
    """
    heartbeat: Any = read_heartbeat(model_dir)
    starts = read_manifest(model_dir).get("starts")
    if heartbeat is None or not isinstance(starts, list):
        return []

    beats = [*heartbeat.get("earlier", ()), heartbeat]
    begins = [datetime.fromisoformat(beat["started"]) for beat in beats]
    ends = [datetime.fromisoformat(beat["beat"]) for beat in beats]
    if now is not None and not heartbeat["ended"]:
        ends[-1] = max(ends[-1], now)

    # A start belongs to the last process that had begun then. The manifest rounds times down.
    attempts: dict[int, _Attempt] = {}
    for start in starts:
        time = datetime.fromisoformat(start["time"])
        candidates = [
            number for number, begin in enumerate(begins) if begin.replace(microsecond=0) <= time
        ]
        if not candidates:
            continue
        number = candidates[-1]
        beat = beats[number]
        # A process that was killed soon after its record had no heartbeat after it.
        attempts[number] = _Attempt(
            begin=begins[number],
            end=max(ends[number], time),
            first_step=int(start.get("step", 0)),
            last_step=int(beat["step"]),
            has_finished=beat["ended"] == "done",
        )
    return list(attempts.values())
