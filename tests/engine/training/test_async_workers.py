"""What asks for a parameter-server strategy, under strategies that are none."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.evaluator import AsyncWorkers


@pytest.mark.parametrize("kind", ["default", "OneDeviceStrategy"])
def test_synchronous_training_has_no_coordinator(kind: str) -> None:
    strategy: tf.distribute.Strategy = tf.distribute.get_strategy()
    if kind == "OneDeviceStrategy":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    workers = AsyncWorkers(strategy)

    workers.join()

    message = (
        f"needs a parameter-server strategy.*{type(strategy).__name__}"
        ".*a tf.distribute.ParameterServerStrategy"
    )

    with pytest.raises(UsageError, match=message):
        _ = workers.coordinator
