"""Rules of optimization as a whole. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.schema.optimization import (
    EMAConfig,
    NamedOptimizerConfig,
    OptimizationConfig,
)
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig


def test_everything_is_off_by_default() -> None:
    config = OptimizationConfig()

    assert (
        config.optimizer.get()
        is config.learning_rate.get()
        is config.warmup.get()
        is config.ema
        is None
    )


def test_an_optimizer_needs_a_learning_rate() -> None:
    assert wrong_fields(OptimizationConfig, {"optimizer": {"type": "sgd"}}) == [
        "learning_rate.type"
    ]

    both = OptimizationConfig(
        optimizer=OptimizerConfig(type="sgd"), learning_rate=LrConfig(type="constant")
    )
    assert both.learning_rate.get().learning_rate == 0.1


@pytest.mark.parametrize("values", [{"average_decay": 1.1}, {"start_step": -1}])
def test_an_average_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    assert wrong_fields(EMAConfig, values) == [*values]


def test_all_averages_are_evaluated_alike_and_on_the_same_data() -> None:
    section = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant"},
        "variables": ("a",),
    }
    both = ("average", "weights")
    groups = {"a": {**section, "ema": {"evaluate": both}}, "b": {**section, "ema": {}}}

    assert wrong_fields(TrainerConfig, {"optimizers": groups}) == ["optimizers.b.ema.evaluate"]

    again = {
        "optimizer_config": {"ema": {"evaluate": both}},
        "eval_recreate_iterator": False,
        "validation_steps": 3,
    }
    assert wrong_fields(TrainerConfig, again) == ["optimizer_config.ema.evaluate"]


def test_an_optimizer_of_several_averages_no_batch_statistics() -> None:
    section = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant"},
        "variables": ("a",),
    }
    ema = {"trainable_weights_only": False}

    assert wrong_fields(NamedOptimizerConfig, {**section, "ema": ema}) == [
        "ema.trainable_weights_only"
    ]

    allowed = TrainerConfig(optimizers={"a": section}, optimizer_config={"ema": ema})
    assert allowed.optimizer_config.ema == EMAConfig(**ema)

    NamedOptimizerConfig(**section, ema={})
