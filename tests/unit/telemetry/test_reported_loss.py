"""Which loss a loop has reported."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainer_kit.telemetry.scalars import reported_loss


@pytest.mark.parametrize(
    ("logs", "loss"),
    [
        ({"training_loss": 2.0, "other": 9.0}, 2.0),
        ({"one": {"training_loss": 2.0, "error": 9.0}, "other": {"training_loss": 3.0}}, 3.0),
        ({"one": {"training_loss": math.inf}, "other": {"training_loss": 3.0}}, math.inf),
        ({"error": 9.0}, 0.0),
    ],
)
def test_of_the_losses_of_several_tasks_the_worst_one_counts(logs: dict[str, Any], loss: float) -> None:
    assert reported_loss(logs) == loss
