"""Goal: up to which step a controller is asked to train, and what it evaluates on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trainer_kit.errors import DataError
from trainer_kit.training.loops.intervals import all_due


@dataclass(frozen=True)
class Goal:
    """What a controller is asked to do.

    Attributes:
      step: the global step to train up to; -1: until the data ends.
      eval_steps: batches in an evaluation; -1: all.
      intervals: the steps between evaluations of each validation set; None: only at the end. Empty: no evaluations.
      saves_last: whether the last step is saved in any case.
    """

    step: int
    eval_steps: int
    intervals: Mapping[str, int | None]
    saves_last: bool

    def due(self, before: int, step: int, last: bool, asked: Collection[str]) -> list[str]:
        """Returns the validation sets to evaluate at `step`, of a loop that began at `before`."""
        due = {*all_due(before, step, step if last else self.step, self.intervals), *asked}
        return [name for name in self.intervals if name in due]


def data_ended_early(step: int, total: int) -> DataError:
    """Returns the error of a run whose data has ended at `step`, before its last one."""
    return DataError(
        f"task.train_data ended at step {step} of {total}; repeat the data (an ArraySource does with "
        "task.train_data.is_training=true), or set trainer.train_steps to -1 to train until it ends "
        "(the checkpoint of this step is saved)"
    )
