"""Optimizers and schedules that users register, in the config: Python, overrides, YAML, gin, messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_kit.config.experiments import register_experiment
from trainer_kit.config.merge import apply
from trainer_kit.config.registration import register_dataset, register_metric, register_optimizer, register_schedule
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import DatasetConfig, ExperimentConfig
from trainer_kit.config.schema.metrics import MetricConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizers import BaseOptimizerConfig, OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.config.sources.gin_source import gin_first_pass
from trainer_kit.errors import ConfigError, UsageError


@configclass
class LookaheadConfig(BaseOptimizerConfig):
    """Lookahead, for these tests.

    Attributes:
      sync_period: The number of steps between two synchronizations.
    """

    sync_period: int = 6


@pytest.fixture(autouse=True)
def lookahead() -> Iterator[None]:
    """Registers an optimizer and a schedule for the time of a test."""
    register_optimizer("lookahead", LookaheadConfig)(lambda config, learning_rate: (config, learning_rate))
    register_schedule("flat")(lambda config: 0.5)
    yield
    for choice in (OptimizerConfig, LrConfig, DatasetConfig, MetricConfig):
        choice.registry._entries.clear()


def _overridden(text: str) -> ExperimentConfig:
    return apply(ExperimentConfig(), [read_params_override(text)]).config


def test_it_is_chosen_and_set_like_a_built_in_one() -> None:
    config = OptimizerConfig(type="lookahead", lookahead=LookaheadConfig(sync_period=3))
    assert config.get() == config.lookahead == LookaheadConfig(sync_period=3)
    assert OptimizerConfig(type="lookahead", lookahead={"sync_period": 3}) == config
    assert OptimizerConfig(type="lookahead").get() == LookaheadConfig()
    assert OptimizerConfig().replace(type="lookahead", lookahead={"sync_period": 3}) == config
    assert config.replace(lookahead={"clipnorm": 1.0}).get() == LookaheadConfig(sync_period=3, clipnorm=1.0)


def test_nested_plain_values_choose_it_too() -> None:
    section = {"type": "lookahead", "lookahead": {"sync_period": 3}}
    config = OptimizationConfig(optimizer=section, learning_rate={"type": "flat"})  # type: ignore[arg-type]
    assert config.optimizer.get() == LookaheadConfig(sync_period=3)


def test_another_choice_drops_its_section() -> None:
    config = OptimizerConfig(type="lookahead", lookahead={"sync_period": 3})
    other = config.replace(type="sgd")
    assert other == OptimizerConfig(type="sgd") and other.as_dict().keys() == {"type", "sgd"}


def test_overrides_choose_and_set_it() -> None:
    prefix = "trainer.optimizer_config"
    config = _overridden(
        f"{prefix}.optimizer.type=lookahead,{prefix}.optimizer.lookahead.sync_period=2,{prefix}.learning_rate.type=flat"
    )
    assert config.trainer.optimizer_config.optimizer.get() == LookaheadConfig(sync_period=2)
    again = from_yaml(to_yaml(config), ExperimentConfig())
    assert again == config


def test_gin_binds_it_by_its_config_class(tmp_path: Path) -> None:
    register_experiment(f"registered_{tmp_path.name}")(ExperimentConfig)
    bindings = [
        "OptimizerConfig.type = 'lookahead'",
        "LookaheadConfig.sync_period = 2",
        "LrConfig.type = 'flat'",
    ]
    found = gin_first_pass([], bindings, f"registered_{tmp_path.name}")
    assert not found.mistakes
    config = apply(found.config, [found.layer]).config
    assert config.trainer.optimizer_config.optimizer.get() == LookaheadConfig(sync_period=2)


def test_copies_keep_it() -> None:
    config = OptimizerConfig(type="lookahead", lookahead={"sync_period": 3})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.type=lookahed", "did you mean lookahead?"),
        ("optimizer.type=lookahead,optimizer.lookahead.sync_perid=2", "did you mean .*lookahead.sync_period"),
        ("optimizer.type=lookahead,optimizer.lookahead.sync_period=often", "'often' is not a whole number"),
        ("optimizer.type=sgd,optimizer.lookahed.sync_period=2", "no such key"),
    ],
)
def test_a_mistake_has_its_path_and_a_near_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts = [f"trainer.optimizer_config.{part}" for part in override.split(",")]
        _overridden(",".join([*parts, "trainer.optimizer_config.learning_rate.type=flat"]))


def test_an_unknown_name_in_python_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lookahed' is not one of sgd, .*did you mean lookahead\?"):
        OptimizerConfig(type="lookahed")
    with pytest.raises(ConfigError, match=r"sync_perid"):
        OptimizerConfig(type="lookahead", lookahead={"sync_perid": 3})


def test_a_name_that_is_taken_or_no_name_is_refused() -> None:
    for name in ("lookahead", "sgd", "type", "a/b", ""):
        with pytest.raises(UsageError, match=r"registered already|own|not a name"):
            register_optimizer(name)(lambda config, rate: None)


def test_a_section_class_has_to_be_a_configclass() -> None:
    class Plain(Config):
        pass

    with pytest.raises(UsageError, match="configclass"):
        register_schedule("plain", Plain)


def test_a_dataset_is_chosen_in_the_section_of_the_data() -> None:
    with pytest.raises(ConfigError, match="no dataset is registered, so none is called 'moons'; name the module"):
        _overridden("task.train_data.dataset.type=moons")
    register_dataset("moons", LookaheadConfig)(lambda config, params: None)
    config = _overridden("task.train_data.dataset={type: moons, moons: {sync_period: 4}}")
    assert config.task.train_data.dataset.get() == LookaheadConfig(sync_period=4)
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


def test_metrics_are_a_list_of_registered_ones_and_keras_own() -> None:
    register_metric("f1", LookaheadConfig)(lambda config: None)
    config = _overridden("trainer.metrics=[{type: f1, f1: {sync_period: 4}}, {type: keras, keras: {metric: AUC}}]")
    first, second = config.trainer.metrics
    assert first.get() == LookaheadConfig(sync_period=4) and second.get().metric == "AUC"
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("[{type: f2}]", "trainer.metrics.0.type.*did you mean f1|is not one of keras, f1"),
        ("[{keras: {metric: AUC}}]", "has no effect while|is needed"),
        ("[{type: keras}]", "metric.*is needed"),
    ],
)
def test_a_mistake_in_a_metric_has_its_place(metrics: str, message: str) -> None:
    register_metric("f1")(lambda config: None)
    with pytest.raises(ConfigError, match=message):
        _overridden(f"trainer.metrics={metrics}")
