"""Gradient processors in a config: text, patterns, several optimizers, registered ones, and mistakes."""

from __future__ import annotations

import pytest

from trainer_kit.config.merge import apply
from trainer_kit.config.registration import register_gradient_processor
from trainer_kit.config.registry import Registry
from trainer_kit.config.resume_check import check_resume, compare
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.gradient_processors import GradientNoiseConfig, GradientProcessorConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.errors import ConfigError, UsageError

SGD = "optimizer: {type: sgd}, learning_rate: {type: constant}"
NOISE = "{type: noise, noise: {stddev: 0.1}, variables: [kernel]}"
AROUND = ("optimizer_config={{{}}}", "optimizers={{net: {{variables: [net], {}}}}}")


def _overridden(processors: str, around: str = AROUND[0]) -> ExperimentConfig:
    text = around.format(f"{SGD}, gradient_processors: {processors}")
    return apply(ExperimentConfig(), [read_params_override(f"trainer.{text}")]).config


@pytest.mark.parametrize("around", AROUND)
def test_they_survive_a_round_trip_in_their_order(around: str) -> None:
    config = _overridden(f"[{NOISE}, {{type: centralize}}]", around)
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config
    section = config.trainer.optimizers.get("net", config.trainer.optimizer_config)
    noise, centralize = section.gradient_processors
    assert (noise.get(), noise.variables) == (GradientNoiseConfig(stddev=0.1), ("kernel",))
    assert centralize.as_dict() == {"type": "centralize", "centralize": {}}


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ("[{type: nois}]", "gradient_processors.0.type.*did you mean noise"),
        ("[{type: noise}]", "stddev.*is needed"),
        ("[{type: clip_norm, clip_norm: {bound: 0}}]", "bound"),
        ("[{type: check, variables: ['a(']}]", "is not a regular expression"),
        ("[{variables: [a]}]", "type.*is needed; give one of scale, clip_value"),
    ],
)
def test_a_mistake_has_its_place(processors: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _overridden(processors)


@pytest.mark.parametrize(
    ("processor", "override", "around"),
    [
        ("check", "runtime.enable_xla=true", AROUND[0]),
        ("summarize", "runtime.enable_xla=true", AROUND[1]),
        ("summarize", "trainer.fuse_steps=2", AROUND[0]),
    ],
)
def test_one_that_xla_cannot_compile_is_refused(processor: str, override: str, around: str) -> None:
    config = _overridden(f"[{{type: centralize}}, {{type: {processor}}}]", around)
    with pytest.raises(ConfigError) as caught:
        apply(config, [read_params_override(override)])
    path = "optimizer_config" if around == AROUND[0] else "optimizers.net"
    assert f"trainer.{path}.gradient_processors.1.type" in str(caught.value)
    assert f"{processor} " in str(caught.value) and f"with {override}: XLA " in str(caught.value)


def test_a_registered_one_has_patterns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientProcessorConfig, "registry", Registry("gradient processor"))
    with pytest.raises(UsageError, match="'variables' is not a name for a gradient processor"):
        register_gradient_processor("variables")(lambda config: None)
    register_gradient_processor("sign")(lambda config: None)
    config = _overridden("[{type: sign, variables: [kernel]}]")
    (sign,) = config.trainer.optimizer_config.gradient_processors
    assert (sign.type, sign.variables) == ("sign", ("kernel",))
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


def test_an_earlier_run_resumes_but_not_with_processors() -> None:
    config = _overridden("[]")
    record = config.as_dict()
    del record["trainer"]["optimizer_config"]["gradient_processors"]
    assert compare(record, config) == []
    with pytest.raises(ConfigError, match=r"gradient_processors: was \[\] when this run began"):
        check_resume(to_yaml(config), _overridden(f"[{NOISE}]"), [])
