"""What the tests of optimizers share: configs, and strategies over some of the four logical CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.config.schema.optimization import OptimizationConfig

ConfigMaker = Callable[..., OptimizationConfig]
StrategyMaker = Callable[[int], Any]


@pytest.fixture(scope="session")
def optimization() -> ConfigMaker:
    """A maker of configs from an optimizer's type, a constant learning rate and fields of the optimizer's section."""
    has_muon = tuple(map(int, keras.version().split(".")[:2])) >= (3, 13)

    def make(type: str, learning_rate: float = 0.1, **fields: Any) -> OptimizationConfig:
        if type == "muon" and not has_muon:
            pytest.skip("Keras before 3.13")
        rate = {"type": "constant", "constant": {"learning_rate": learning_rate}}
        return OptimizationConfig(optimizer={"type": type, type: fields}, learning_rate=rate)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def replicas() -> StrategyMaker:
    """A maker of strategies from a number of replicas: the default one for 1, else mirrored over logical CPUs.

    TensorFlow's collectives, which mirroring over CPUs uses, fail once a process has two strategies that use them. So
    each is made once, and only that of 2 uses them.
    """

    @functools.cache
    def make(count: int) -> Any:
        if count == 1:
            return tf.distribute.get_strategy()
        reduction = None if count == 2 else tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)], reduction)

    return make
