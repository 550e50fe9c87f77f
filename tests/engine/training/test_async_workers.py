"""What asks for a parameter-server strategy, under strategies that are none."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.evaluator import AsyncWorkers


@pytest.mark.parametrize("strategy", ["default", "OneDeviceStrategy"])
def test_synchronous_training_has_no_coordinator(strategy: str) -> None:
    one = tf.distribute.OneDeviceStrategy("CPU:0") if strategy != "default" else tf.distribute.get_strategy()
    workers = AsyncWorkers(one)
    workers.join()
    message = f"needs a parameter-server strategy.*{type(one).__name__}.*a tf.distribute.ParameterServerStrategy"
    with pytest.raises(UsageError, match=message):
        _ = workers.coordinator


def test_dataset_function_gets_strategy_and_arguments() -> None:
    workers = AsyncWorkers(tf.distribute.get_strategy())

    def make(strategy: Any, count: int, *, start: int) -> tuple[Any, list[int]]:
        return strategy, list(range(start, start + count))

    assert workers.per_worker(make, 2, start=5) == (tf.distribute.get_strategy(), [5, 6])
