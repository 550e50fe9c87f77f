"""Rules of optimization as a whole. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.schema.broken_rules import broken
from trainer_kit.config.schema.optimization import EMAConfig, OptimizationConfig
from trainer_kit.config.schema.optimizers import OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.errors import ConfigError


def test_everything_is_off_by_default() -> None:
    config = OptimizationConfig()
    assert config.optimizer.get() is config.learning_rate.get() is config.warmup.get() is config.ema is None


def test_an_optimizer_needs_a_learning_rate() -> None:
    assert broken(OptimizationConfig, {"optimizer": {"type": "sgd"}}) == ["learning_rate.type"]
    both = OptimizationConfig(optimizer=OptimizerConfig(type="sgd"), learning_rate=LrConfig(type="constant"))
    assert both.learning_rate.get().learning_rate == 0.1


@pytest.mark.parametrize("values", [{"average_decay": 1.1}, {"start_step": -1}])
def test_an_average_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EMAConfig(**values)
