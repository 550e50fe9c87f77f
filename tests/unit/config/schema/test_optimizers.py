"""The choice of an optimizer, and the rules of the sections. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.optimizers import (
    AdafactorConfig,
    AdamConfig,
    FtrlConfig,
    LAMBConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    SGDConfig,
)
from trainer_kit.errors import ConfigError


@pytest.mark.parametrize("name", sorted(OptimizerConfig.branches()))
def test_every_optimizer_can_be_chosen_by_its_name(name: str) -> None:
    config = OptimizerConfig(type=name)  # type: ignore[arg-type]
    assert type(config.get()) is OptimizerConfig.branches()[name]


@pytest.mark.parametrize("name", ["slide", "adafactor_keras", "sgd_experimental", "Adam"])
def test_other_optimizers_are_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of sgd, adam, adamw"):
        OptimizerConfig(type=name)  # type: ignore[arg-type]


def test_there_is_one_way_of_clipping() -> None:
    assert wrong_fields(AdamConfig, {"clipnorm": 1.0, "clipvalue": 1.0}) == ["clipvalue"]
    assert wrong_fields(SGDConfig, {"clipvalue": 1.0, "global_clipnorm": 1.0}) == ["global_clipnorm"]
    assert AdamConfig(clipnorm=1.0).clipnorm == 1.0


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        (SGDConfig, {"decay": 0.1}),
        (SGDConfig, {"momentum": 1.5}),
        (AdamConfig, {"epsilon": -1.0}),
        (AdamConfig, {"beta_2": 1.0}),
        (AdamConfig, {"clipnorm": 0.0}),
        (LAMBConfig, {"exclude_from_layer_adaptation": ("a",)}),
        (AdafactorConfig, {"factored": False}),
        (AdafactorConfig, {"beta1": 0.9}),
        (LionConfig, {"beta_1": 0.0}),
        (FtrlConfig, {"learning_rate_power": 0.5}),
        (MuonConfig, {"ns_steps": 0}),
        (ScheduleFreeAdamWConfig, {"beta_1": 0.0}),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(config_class: type[Config], values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_class(**values)
