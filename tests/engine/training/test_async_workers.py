"""What asks for a parameter-server strategy, under strategies that are none."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.evaluator import AsyncWorkers


@pytest.mark.parametrize("strategy", ["default", "OneDeviceStrategy"])
def test_synchronous_training_has_no_coordinator(strategy: str) -> None:
    one = (
        tf.distribute.OneDeviceStrategy("CPU:0")
        if strategy != "default"
        else tf.distribute.get_strategy()
    )
    workers = AsyncWorkers(one)
    workers.join()
    message = f"needs a parameter-server strategy.*{type(one).__name__}.*a tf.distribute.ParameterServerStrategy"
    with pytest.raises(UsageError, match=message):
        _ = workers.coordinator
