"""Finite check: stops a run before it saves or evaluates a loss or weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import DivergedError
from trainer_kit.telemetry.scalars import get_training_loss


class CollectiveDivergedError(DivergedError):
    """A divergence that FiniteCheck has found. All workers raise it at the same step."""


class FiniteCheck(Callback):
    """Checks the loss that a loop reports, and the weights.

    Runs eagerly, on the host, on every worker.

    The optimizer's variables can be infinite before the weights are. They are checked only after a
    restore: a check before each save would block the loop for longer than the save does.

    Args:
      loss_upper_bound: The run has diverged when its loss is above this bound.
      begin_steps: The first step at which the bound applies.
    """

    chief_only = False
    name = "finite_check"

    def __init__(self, loss_upper_bound: float, begin_steps: int = 0) -> None:
        self._bound = loss_upper_bound
        self._begin_steps = begin_steps

    def boundary_begin(self, run: Run, logs: Mapping[str, object]) -> None:
        """Checks the logs of a loop, unless a callback has asked for a rewind because of them.

        Raises:
          DivergedError: when the loss is not finite or above its bound, or the loop found a weight
            that is not finite.
        """
        assert run.loop is not None
        loss = get_training_loss(logs)
        step = run.loop.end
        is_above_bound = step >= self._begin_steps and loss > self._bound
        if not math.isfinite(loss) or is_above_bound:
            raise CollectiveDivergedError(
                f"training_loss is {loss} at step {step} (trainer.loss_upper_bound is"
                f" {self._bound:g})"
            )
        if run.trainer.weights_finite is False:
            raise CollectiveDivergedError(f"a weight is not finite at step {step}")

    def checkpoint_begin(self, run: Run) -> None:
        """Checks the weights before they are saved, if the last loop did not check them.

        Raises:
          DivergedError: when a weight is not finite.
        """
        self._check_weights(run)

    def evaluation_begin(self, run: Run) -> None:
        """Checks the weights before they are evaluated, if the last loop did not check them.

        Raises:
          DivergedError: when a weight is not finite.
        """
        self._check_weights(run)

    def _check_weights(self, run: Run) -> None:
        # None means that the last loop did not check the weights.
        if run.trainer.weights_finite is None:
            run.trainer.weights_finite = run.trainer.state.weights_are_finite()
        if not run.trainer.weights_finite:
            raise CollectiveDivergedError(f"a weight is not finite at step {run.step}")
