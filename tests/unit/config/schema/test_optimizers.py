"""The choice of an optimizer and the rules of its sections; defaults are elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.optimizer_configs import (
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


@pytest.mark.parametrize("name", sorted(OptimizerConfig.branches()))
def test_every_optimizer_can_be_chosen_by_its_name(name: str) -> None:
    config = OptimizerConfig(type=name)  # type: ignore[arg-type]
    assert type(config.get()) is OptimizerConfig.branches()[name]


@pytest.mark.parametrize(
    ("config_class", "values", "field"),
    [
        *(
            (OptimizerConfig, {"type": name}, "type")
            for name in ("slide", "adafactor_keras", "sgd_experimental", "Adam")
        ),
        (AdamConfig, {"clipnorm": 1.0, "clipvalue": 1.0}, "clipvalue"),
        (SGDConfig, {"clipvalue": 1.0, "global_clipnorm": 1.0}, "global_clipnorm"),
        (SGDConfig, {"decay": 0.1}, "decay"),
        (SGDConfig, {"momentum": 1.5}, "momentum"),
        (AdamConfig, {"epsilon": -1.0}, "epsilon"),
        (AdamConfig, {"beta_2": 1.0}, "beta_2"),
        (AdamConfig, {"clipnorm": 0.0}, "clipnorm"),
        (LAMBConfig, {"exclude_from_layer_adaptation": ("a",)}, "exclude_from_layer_adaptation"),
        (AdafactorConfig, {"factored": False}, "factored"),
        (AdafactorConfig, {"beta1": 0.9}, "beta1"),
        (LionConfig, {"beta_1": 0.0}, "beta_1"),
        (FtrlConfig, {"learning_rate_power": 0.5}, "learning_rate_power"),
        (MuonConfig, {"ns_steps": 0}, "ns_steps"),
        (ScheduleFreeAdamWConfig, {"beta_1": 0.0}, "beta_1"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(
    config_class: type[Config], values: dict[str, Any], field: str
) -> None:
    assert wrong_fields(config_class, values) == [field]
