"""Rules of optimizer, schedule and warm-up configs. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.optimization import EMAConfig, OptimizationConfig
from trainer_kit.config.schema.optimizers import AdafactorConfig, AdamConfig, LAMBConfig, OptimizerConfig, SGDConfig
from trainer_kit.config.schema.schedules import LrConfig, StepCosineLrConfig, StepwiseLrConfig
from trainer_kit.config.schema.warmups import WarmupConfig
from trainer_kit.errors import ConfigError


def broken(config_class: type[Config], values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_class(**values)
    return [name for details in caught.value.errors() for name, _ in details.get("ctx", {}).get("broken", [])]


def test_everything_is_off_by_default() -> None:
    config = OptimizationConfig()
    assert config.optimizer.get() is config.learning_rate.get() is config.warmup.get() is config.ema is None


@pytest.mark.parametrize("name", sorted(OptimizerConfig.branches()))
def test_every_optimizer_can_be_chosen_by_its_name(name: str) -> None:
    config = OptimizerConfig(type=name)  # type: ignore[arg-type]
    assert type(config.get()) is OptimizerConfig.branches()[name]


@pytest.mark.parametrize("name", ["slide", "adafactor_keras", "sgd_experimental", "Adam"])
def test_other_optimizers_are_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of sgd, adam, adamw"):
        OptimizerConfig(type=name)  # type: ignore[arg-type]


def test_an_optimizer_needs_a_learning_rate() -> None:
    assert broken(OptimizationConfig, {"optimizer": {"type": "sgd"}}) == ["learning_rate.type"]
    both = OptimizationConfig(optimizer=OptimizerConfig(type="sgd"), learning_rate=LrConfig(type="constant"))
    assert both.learning_rate.get().learning_rate == 0.1


def test_there_is_one_way_of_clipping() -> None:
    assert broken(AdamConfig, {"clipnorm": 1.0, "clipvalue": 1.0}) == ["clipvalue"]
    assert broken(SGDConfig, {"clipvalue": 1.0, "global_clipnorm": 1.0}) == ["global_clipnorm"]
    assert AdamConfig(clipnorm=1.0).clipnorm == 1.0


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("stepwise", {"boundaries", "values"}),
        ("step_cosine_with_offset", {"boundaries", "values"}),
        ("exponential", {"initial_learning_rate", "decay_steps", "decay_rate"}),
        ("polynomial", {"initial_learning_rate", "decay_steps"}),
        ("cosine", {"initial_learning_rate", "decay_steps"}),
        ("power", {"initial_learning_rate"}),
        ("power_linear", {"initial_learning_rate", "total_decay_steps"}),
        ("power_with_offset", {"initial_learning_rate"}),
        ("cosine_restarts", {"initial_learning_rate", "first_decay_steps"}),
        ("one_cycle", {"max_learning_rate", "total_steps"}),
        ("inverse_time", {"initial_learning_rate", "decay_steps", "decay_rate"}),
    ],
)
def test_a_schedule_names_all_the_numbers_that_it_lacks(name: str, missing: set[str]) -> None:
    assert set(broken(LrConfig, {"type": name})) == {f"{name}.{field}" for field in missing}


def test_a_warm_up_has_a_length() -> None:
    for name in WarmupConfig.branches():
        assert broken(WarmupConfig, {"type": name}) == [f"{name}.warmup_steps"]
        assert WarmupConfig(**{"type": name, name: {"warmup_steps": 5}}).get().warmup_steps == 5  # type: ignore[arg-type]


def test_boundaries_increase_and_fit_their_values() -> None:
    assert broken(StepwiseLrConfig, {"boundaries": (5, 5), "values": (1.0, 2.0, 3.0)}) == ["boundaries"]
    assert broken(StepwiseLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0)}) == ["values"]
    assert broken(StepCosineLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0, 3.0)}) == ["values"]
    assert broken(StepCosineLrConfig, {"boundaries": (6, 5), "values": (1.0,)}) == ["boundaries", "values"]
    assert StepwiseLrConfig(boundaries=(5,), values=(1.0, 2.0)).values == (1.0, 2.0)


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        (SGDConfig, {"decay": 0.1}),
        (SGDConfig, {"momentum": 1.5}),
        (AdamConfig, {"epsilon": -1.0}),
        (AdamConfig, {"clipnorm": 0.0}),
        (LAMBConfig, {"exclude_from_layer_adaptation": ("a",)}),
        (AdafactorConfig, {"factored": False}),
        (AdafactorConfig, {"beta1": 0.9}),
        (EMAConfig, {"average_decay": 1.1}),
        (EMAConfig, {"start_step": -1}),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(config_class: type[Config], values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_class(**values)
