"""Multipliers of learning rates and layer-wise decay in a config."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import override_setting, sample_experiment, wrong_fields
from trainer_kit.config.schema.optimization import (
    LayerDecayConfig,
    OptimizationConfig,
    RateMultiplierConfig,
)
from trainer_kit.config.serialize import from_yaml, to_yaml


def test_rate_groups_are_set_in_text_and_survive_a_round_trip() -> None:
    multipliers = "[{variables: encoder/, multiplier: 0.1}, {variables: bias, multiplier: 2}]"
    decay = "{decay: 0.9, layers: [embedding, block]}"
    section = f"{{learning_rate_multipliers: {multipliers}, layer_decay: {decay}}}"
    config = override_setting(f"trainer.optimizer_config={section}")
    options = config.trainer.optimizer_config

    assert options.learning_rate_multipliers == (
        RateMultiplierConfig(variables="encoder/", multiplier=0.1),
        RateMultiplierConfig(variables="bias", multiplier=2.0),
    )
    assert options.layer_decay == LayerDecayConfig(decay=0.9, layers=("embedding", "block"))
    assert from_yaml(to_yaml(config), sample_experiment()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate_multipliers", [{"variables": "a", "multiplier": 0.5}]),
        ("layer_decay", {"decay": 0.5, "layers": ["a"]}),
    ],
)
def test_rate_groups_need_an_optimizer_of_the_config(field: str, value: Any) -> None:
    assert field in wrong_fields(OptimizationConfig, {field: value})[0]
