"""Finite checks: a run is not saved, evaluated or continued while its loss or its weights are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer_kit.errors import DivergedError
from trainer_kit.telemetry.scalars import flat_scalars

LOSS = "training_loss"


def reported_loss(logs: Mapping[str, Any]) -> float:
    """Returns the training loss in the logs of a loop, 0 without one; of several tasks' the one to worry about most."""
    if LOSS in logs:
        return float(logs[LOSS])
    losses = [loss for name, loss in flat_scalars(logs).items() if name.endswith(f"/{LOSS}")]
    return next((loss for loss in losses if not math.isfinite(loss)), max(losses, default=0.0))


class FiniteCheck:
    """Looks at the loss that a loop reports and at the weights. Eager, on the host.

    Args:
      trainer: whose state it is. Its attribute `sound` tells what is known of the weights: None is nothing.
      loss_bound: `(bound, first step that it counts at)`; None: any loss and any weights will do.
    """

    def __init__(self, trainer: Any, loss_bound: tuple[float, int] | None) -> None:
        self._trainer, self._bound = trainer, loss_bound

    def check(self, step: int, logs: Mapping[str, Any]) -> None:
        """Takes what a loop has reported at its end.

        Raises:
          DivergedError: when the loss is not finite or above its bound, or a weight is not finite, as the loop saw.
        """
        if self._bound is None:
            return
        loss, (bound, first_step) = reported_loss(logs), self._bound
        if not math.isfinite(loss) or (step >= first_step and loss > bound):
            raise DivergedError(f"training_loss is {loss} at step {step} (trainer.loss_upper_bound is {bound:g})")
        if getattr(self._trainer, "sound", True) is False:
            raise DivergedError(f"a weight is not finite at step {step}")

    def require(self, step: int) -> None:
        """Looks at the weights where the last loop did not, before they are saved or evaluated.

        What an optimizer keeps can be infinite while the weights are not yet. That is looked at after a restore only:
        before each save it would block the loop for longer than the save does.

        Raises:
          DivergedError: when a weight is not finite.
        """
        trainer = self._trainer
        if self._bound is None or trainer is None or not hasattr(trainer, "state"):
            return
        if trainer.sound is None:
            trainer.sound = trainer.state.weights_are_sound()
        if not trainer.sound:
            raise DivergedError(f"a weight is not finite at step {step}")
