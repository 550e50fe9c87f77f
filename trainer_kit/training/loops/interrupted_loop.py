"""Remembers a training loop that a stop interrupted, so that a resumed run ends and reports it at the same step."""

from __future__ import annotations

from trainer_kit.training.loops.intervals import StepsPerLoop, loop_length


class InterruptedLoop:
    """The first and last step of a loop that a stop interrupted; saved in the checkpoint.

    Attributes:
      steps: The global steps before the loop and at its end; None when no loop was interrupted.
    """

    def __init__(self) -> None:
        self.steps: tuple[int, int] | None = None

    def next(self, step: int, target: int | None, steps_per_loop: StepsPerLoop) -> tuple[int, int]:
        """Returns the begin and end of the loop to run at `step`, towards `target` (None: no target)."""
        if self.steps is None:
            return step, step + loop_length(step, target, steps_per_loop)
        begun, end = self.steps
        return begun, end if target is None else min(end, target)

    def state(self) -> list[int] | None:
        """Returns the state for a checkpoint."""
        return list(self.steps) if self.steps else None

    def put_back(self, state: list[int] | None) -> None:
        """Restores the state of a checkpoint."""
        self.steps = (state[0], state[1]) if state else None
