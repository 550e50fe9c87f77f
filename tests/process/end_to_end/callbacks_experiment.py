"""A user's callback, in the file of an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trainer_kit


@trainer_kit.register_callback("weight_norm")
class WeightNorm(trainer_kit.Callback):
    """Reports the norm of the kernel at its steps, and remembers the largest one."""

    def __init__(self, every: int = 20) -> None:
        self.every = every
        self.largest = 0.0
        self.evaluations = 0

    def loop_end(self, run: Any, logs: Any) -> None:
        norm = float((run.model.layers[-1].kernel.numpy() ** 2).sum() ** 0.5)
        self.largest = max(self.largest, norm)
        run.report("weight_norm", norm)

    def evaluation_end(self, run: Any, logs: Any) -> None:
        self.evaluations += 1

    def run_end(self, run: Any) -> None:
        Path(run.directory, "largest.json").write_text(json.dumps([self.largest, self.evaluations]))

    def state(self) -> Any:
        return [self.largest, self.evaluations]

    def restore(self, state: Any) -> None:
        self.largest, self.evaluations = state
