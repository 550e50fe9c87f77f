"""Finds the training loss in the logs of a loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer_kit.telemetry.scalars import flat_scalars

LOSS = "training_loss"


def reported_loss(logs: Mapping[str, Any]) -> float:
    """Returns the training loss from the logs of a loop; 0 if there is none.

    With several tasks, it is the first loss that is not finite, else the largest.
    """
    if LOSS in logs:
        return float(logs[LOSS])
    losses = [loss for name, loss in flat_scalars(logs).items() if name.endswith(f"/{LOSS}")]
    return next((loss for loss in losses if not math.isfinite(loss)), max(losses, default=0.0))
