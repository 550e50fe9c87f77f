"""Remembers a training loop that a stop interrupted, so that a resume ends it and reports it at the same step."""

from __future__ import annotations

from trainer_kit.training.loops.intervals import StepsPerLoop, loop_length


class InterruptedLoop:
    """The steps that a loop runs between, when a stop has cut it; in the checkpoint.

    Attributes:
      steps: before the loop and at its end; None when no loop was cut.
    """

    def __init__(self) -> None:
        self.steps: tuple[int, int] | None = None

    def next(self, step: int, target: int, steps_per_loop: StepsPerLoop) -> tuple[int, int]:
        """Returns the steps of the loop to run at `step`, on the way to `target` (negative: there is none)."""
        if self.steps is None:
            return step, step + loop_length(step, target, steps_per_loop)
        begun, end = self.steps
        return begun, end if target < 0 else min(end, target)

    def state(self) -> list[int] | None:
        """Returns what a checkpoint keeps."""
        return list(self.steps) if self.steps else None

    def put_back(self, state: list[int] | None) -> None:
        """Takes what a checkpoint has kept."""
        self.steps = (state[0], state[1]) if state else None
