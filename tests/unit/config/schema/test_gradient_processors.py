"""Gradient processors in a config: text, patterns, several optimizers, and registered ones."""

from __future__ import annotations

import pytest

from tests.config_builders import collect_mistakes, override_setting
from trainer_kit.config.registration import register_gradient_processor
from trainer_kit.config.registry import Registry
from trainer_kit.config.resume_check import check_resume
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.gradient_processor_configs import (
    GradientNoiseConfig,
    GradientProcessorConfig,
)
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.errors import UsageError

SGD = "optimizer: {type: sgd}, learning_rate: {type: constant}"
NOISE = "{type: noise, noise: {stddev: 0.1}, variables: [kernel]}"
ONE = "optimizer_config={{{}}}"
SEVERAL = "optimizers={{net: {{variables: [net], {}}}}}"


def _set_processors(processors: str, around: str = ONE) -> ExperimentConfig:
    section = around.format(f"{SGD}, gradient_processors: {processors}")
    return override_setting(f"trainer.{section}", ExperimentConfig())


@pytest.mark.parametrize("around", [ONE, SEVERAL])
def test_processors_survive_a_round_trip_in_their_order(around: str) -> None:
    config = _set_processors(f"[{NOISE}, {{type: centralize}}]", around)

    assert from_yaml(to_yaml(config), ExperimentConfig()) == config

    section = config.trainer.optimizers.get("net", config.trainer.optimizer_config)
    noise, centralize = section.gradient_processors

    assert noise.get() == GradientNoiseConfig(stddev=0.1)
    assert noise.variables == ("kernel",)
    assert centralize.as_dict() == {"type": "centralize", "centralize": {}}


@pytest.mark.parametrize(
    ("processor", "override", "around", "section"),
    [
        ("check", "runtime.enable_xla=true", ONE, "optimizer_config"),
        ("summarize", "runtime.enable_xla=true", SEVERAL, "optimizers.net"),
        ("summarize", "trainer.fuse_steps=2", ONE, "optimizer_config"),
    ],
)
def test_a_processor_that_xla_cannot_compile_is_refused(
    processor: str, override: str, around: str, section: str
) -> None:
    config = _set_processors(f"[{{type: centralize}}, {{type: {processor}}}]", around)
    mistake = collect_mistakes(override_setting, override, config)[
        f"trainer.{section}.gradient_processors.1.type"
    ]

    assert f"with {override}: XLA " in str(mistake)


def test_a_registered_processor_has_patterns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientProcessorConfig, "registry", Registry("gradient processor"))

    with pytest.raises(UsageError, match="'variables' is not a name for a gradient processor"):
        register_gradient_processor("variables")(lambda config: None)

    register_gradient_processor("sign")(lambda config: None)
    config = _set_processors("[{type: sign, variables: [kernel]}]")
    (sign,) = config.trainer.optimizer_config.gradient_processors

    assert sign.type == "sign"
    assert sign.variables == ("kernel",)
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


def test_a_resume_with_other_processors_is_refused() -> None:
    other = _set_processors(f"[{NOISE}]")
    mistakes = collect_mistakes(check_resume, to_yaml(_set_processors("[]")), other, [])

    assert "trainer.optimizer_config.gradient_processors" in mistakes
