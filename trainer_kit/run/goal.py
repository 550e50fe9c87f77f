"""Goal: the step that a controller trains up to, and the evaluations before and at that step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer_kit.config.run_length import Interval
from trainer_kit.errors import DataError
from trainer_kit.training.loops.intervals import all_due


@dataclass(frozen=True)
class ExactIntervals:
    """The intervals of a run in epochs or shares, which may be fractions of steps.

    Attributes:
      cuts: The intervals at whose multiples loops end, such as the epochs between checkpoints.
      of_sets: The intervals of evaluations, by validation set.
    """

    cuts: Sequence[Interval] = ()
    of_sets: Mapping[str, Interval] = field(default_factory=dict)

    def replaced(self, intervals: Mapping[str, int | None]) -> dict[str, Interval | None]:
        """Returns the intervals of validation sets, exact where they were rounded."""
        return {name: self.of_sets.get(name, interval) for name, interval in intervals.items()}


@dataclass(frozen=True)
class Goal:
    """The last step of a training run and its evaluations.

    Attributes:
      step: The global step to train up to; -1: until the data ends.
      eval_steps: The number of batches in an evaluation; -1: all.
      intervals: The steps between evaluations of each validation set; None: only at the end. Empty: no evaluations.
      saves_last: Whether the last step is always saved.
    """

    step: int
    eval_steps: int
    intervals: Mapping[str, Interval | None]
    saves_last: bool

    def due(self, before: int, step: int, last: bool, asked: Collection[str]) -> list[str]:
        """Returns the validation sets to evaluate at `step`, at the end of a loop that began at `before`."""
        due = {*all_due(before, step, step if last else self.step, self.intervals), *asked}
        return [name for name in self.intervals if name in due]


def data_ended_early(step: int, total: int) -> DataError:
    """Returns the error of a run whose training data ended at `step`, before the last step `total`."""
    return DataError(
        f"task.train_data ended at step {step} of {total}; repeat the data (an ArraySource does with "
        "task.train_data.is_training=true), or set trainer.train_steps to -1 to train until it ends "
        "(the checkpoint of this step is saved)"
    )
