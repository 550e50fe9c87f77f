"""Finite check: a run is not saved, evaluated or continued while its loss or its weights are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.errors import DivergedError
from trainer_kit.training.losses import reported_loss


class Divergence(DivergedError):
    """What FiniteCheck has found, on all workers alike."""


class FiniteCheck(Callback):
    """Looks at the loss that a loop reports and at the weights, on every worker.

    What an optimizer keeps can be infinite while the weights are not yet. That is looked at after a restore only:
    before each save it would block the loop for longer than the save does.

    Args:
      loss_upper_bound: a loss above it has diverged.
      begin_steps: the step from which on the bound counts.
    """

    chief_only = False
    name = "finite_check"

    def __init__(self, loss_upper_bound: float, begin_steps: int = 0) -> None:
        self._bound, self._begin_steps = loss_upper_bound, begin_steps

    def boundary_begin(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Takes what a loop has reported, if no callback takes the run back because of it.

        Raises:
          DivergedError: when the loss is not finite or above its bound, or a weight is not finite, as the loop saw.
        """
        assert run.loop is not None
        loss, step = reported_loss(logs), run.loop.end
        if not math.isfinite(loss) or (step >= self._begin_steps and loss > self._bound):
            raise Divergence(f"training_loss is {loss} at step {step} (trainer.loss_upper_bound is {self._bound:g})")
        if run.trainer.sound is False:
            raise Divergence(f"a weight is not finite at step {step}")

    def checkpoint_begin(self, run: Run) -> None:
        """Looks at the weights where the last loop did not, before they are saved.

        Raises:
          DivergedError: when a weight is not finite.
        """
        self._require(run)

    def evaluation_begin(self, run: Run) -> None:
        """Looks at the weights where the last loop did not, before they are evaluated.

        Raises:
          DivergedError: when a weight is not finite.
        """
        self._require(run)

    def _require(self, run: Run) -> None:
        if run.trainer.sound is None:
            run.trainer.sound = run.trainer.state.weights_are_sound()
        if not run.trainer.sound:
            raise Divergence(f"a weight is not finite at step {run.step}")
