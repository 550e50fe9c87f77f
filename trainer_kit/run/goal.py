"""Goal: the evaluations of a training run, before and at its last step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trainer_kit.errors import DataError
from trainer_kit.training.loops.intervals import is_due


@dataclass(frozen=True)
class Goal:
    """What happens on the way to the last step of a training run.

    Attributes:
      eval_steps: The number of batches in an evaluation; -1: all.
      intervals: The steps between evaluations of each validation set; None: only at the end. Empty: no evaluations.
      saves_last: Whether the last step is always saved.
    """

    eval_steps: int
    intervals: Mapping[str, int | None]
    saves_last: bool

    def due(self, before: int, step: int, last: bool, asked: Collection[str]) -> list[str]:
        """Returns the validation sets to evaluate after a loop from `before` to `step`: all if it is the last."""
        due = {name for name, interval in self.intervals.items() if interval and is_due(before, step, interval)}
        return [name for name in self.intervals if last or name in due or name in asked]


def data_ended_early(step: int, total: int) -> DataError:
    """Returns the error of a run whose training data ended at `step`, before the last step `total`."""
    return DataError(
        f"task.train_data ended at step {step} of {total}; repeat the data (an ArraySource does with "
        "task.train_data.is_training=true), or set trainer.train_steps to -1 to train until it ends "
        "(the checkpoint of this step is saved)"
    )
