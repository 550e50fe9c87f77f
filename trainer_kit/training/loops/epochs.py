"""Epochs: tells for a global step its epoch and the place in it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from trainer_kit.training.loops.intervals import is_due


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run, counted from 1. Epoch e ends with step ceil(e * steps).

    Attributes:
      steps: The steps of an epoch; a fraction if batches run over the ends of epochs.
    """

    steps: Fraction

    def end(self, epoch: int | Fraction) -> int:
        """Returns the global step that ends an epoch, or a part of one; 0 for epoch 0."""
        return math.ceil(epoch * self.steps)

    def ended(self, step: int) -> int:
        """Returns the number of epochs that have ended after `step` steps."""
        return int(step // self.steps)

    def is_end(self, step: int) -> bool:
        """Whether an epoch ends with this step."""
        return step > 0 and is_due(step - 1, step, self.steps)

    def place(self, step: int) -> tuple[int, int]:
        """Returns the epoch that step number `step` belongs to, and its number in that epoch; (1, 0) for step 0."""
        before = self.ended(max(0, step - 1))
        return before + 1, step - self.end(before)
