"""A tracker that writes to a file, and an experiment that uses it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainer_kit
from tests.builders import wait_until
from tests.engine.linear_task import linear_experiment
from tests.fork_server import train
from trainer_kit.callbacks.trackers import TrackedRun, Tracker
from trainer_kit.files import read_json
from trainer_kit.process.run_lock import EndState

# The step at which a process is killed, once the tracker has the reports before it.
kill_step = 0


def train_and_die_at_step(step: int, *arguments: str) -> None:
    """Trains, and dies at the end of the loop that ends with `step`."""
    global kill_step
    kill_step = step
    train(*arguments)


@trainer_kit.register_callback("file_tracker")
class FileTracker(Tracker):
    """Appends what it gets to a file of JSON lines.

    Args:
      path: The file.
    """

    name = "file_tracker"

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def start(self, tracked_run: TrackedRun) -> None:
        self.tracked_run = tracked_run

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        with self.path.open("a") as stream:
            for step, numbers in reports:
                record = {
                    "id": self.tracked_run.id,
                    "parent": self.tracked_run.parent,
                    "step": step,
                    "numbers": numbers,
                }
                stream.write(json.dumps(record) + "\n")

    def finish(self, end_state: EndState) -> None:
        with self.path.open("a") as stream:
            record = {
                "id": self.tracked_run.id,
                "parent": self.tracked_run.parent,
                "end_state": end_state,
            }
            stream.write(json.dumps(record) + "\n")

    def loop_end(self, run: Any, logs: Any) -> None:
        if run.step == kill_step:
            state_path = Path(run.directory, "trackers/file_tracker.json")
            # It has the training and the evaluation of step 30.
            wait_until(lambda: [30, "validation"] in (read_json(state_path) or {}).values())
            os.kill(os.getpid(), signal.SIGKILL)


@trainer_kit.register_experiment("tracked")
def build_tracked() -> Any:
    """Sixty steps in loops of five, with few checkpoints."""
    return linear_experiment(train_steps=60, checkpoint_interval=20, validation_interval=15)
