"""Multipliers of learning rates and layer-wise decay in a config."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.merge import apply
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.optimization import LayerDecayConfig, OptimizationConfig, RateMultiplierConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.errors import ConfigError

SET = "trainer.optimizer_config={optimizer: {type: sgd}, learning_rate: {type: constant}, "


def _overridden(text: str) -> ExperimentConfig:
    return apply(ExperimentConfig(), [read_params_override(text)]).config


def test_both_are_set_in_text_and_survive_a_round_trip() -> None:
    groups = "[{variables: encoder/, multiplier: 0.1}, {variables: bias, multiplier: 2}]"
    config = _overridden(
        f"{SET}learning_rate_multipliers: {groups}, layer_decay: {{decay: 0.9, layers: [embedding, block]}}}}"
    )
    options = config.trainer.optimizer_config
    assert options.learning_rate_multipliers == (
        RateMultiplierConfig(variables="encoder/", multiplier=0.1),
        RateMultiplierConfig(variables="bias", multiplier=2.0),
    )
    assert options.layer_decay == LayerDecayConfig(decay=0.9, layers=("embedding", "block"))
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "learning_rate_multipliers: [{variables: 'a(', multiplier: 1}]",
            "'a\\(' is not a regular expression .* use 'a",
        ),
        ("learning_rate_multipliers: [{variables: a, multiplier: -1}]", r"multipliers\.0\.multiplier"),
        ("learning_rate_multipliers: [{variables: a}]", "multiplier"),
        ("layer_decay: {decay: 0.9, layers: ['[']}", "is not a regular expression"),
        ("layer_decay: {decay: 0.9, layers: []}", "list the patterns of the layers from input to output"),
        ("layer_decay: {decay: 0, layers: [a]}", "layer_decay.decay"),
        ("layer_decay: {decay: 0.5}", "layer_decay.layers"),
    ],
)
def test_values_that_cannot_be_are_refused(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _overridden(f"{SET}{section}}}")


@pytest.mark.parametrize(
    "section",
    [
        {"learning_rate_multipliers": [{"variables": "a", "multiplier": 0.5}]},
        {"layer_decay": {"decay": 0.5, "layers": ["a"]}},
    ],
)
def test_groups_need_an_optimizer_of_the_config(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"has no effect on the optimizer of the task; set optimizer\.type"):
        OptimizationConfig(**section)
