"""Names of sections and experiments in gin, and forgetting. The rest is in test_gin_source.py."""

from __future__ import annotations

import gin
import pytest

from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources import gin_binding
from trainer_kit.config.sources.gin_scan import scan


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("digits", "experiment.digits"),
        ("vision/resnet/cifar-10", "experiment.vision.resnet.cifar_10"),
        ("3d/unet", "experiment._3d.unet"),
    ],
)
def test_an_experiments_name_becomes_one_that_gin_allows(name: str, selector: str) -> None:
    assert gin_binding.experiment_selector(name) == selector


def test_forgetting_unbinds_what_was_bound_and_no_more() -> None:
    selector = gin_binding.section_selector(TrainerConfig)
    gin_binding.forget(gin)
    before = gin.config_str()
    gin_binding.collect(gin, selector, "trainer")
    assert gin_binding.bind_ours(gin, scan(gin, [], ["TrainerConfig.train_steps = 5"]), "trainer_kit.") == []
    assert gin_binding.call(selector) == {"train_steps": 5}
    assert gin_binding.scopes(selector) == ["trainer"]
    gin_binding.forget(gin)
    assert gin_binding.call(selector) == {}
    assert gin.config_str() == before
    gin_binding.forget(gin)
    assert "TrainerConfig" not in gin.operative_config_str()
