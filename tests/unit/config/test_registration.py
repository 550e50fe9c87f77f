"""Optimizers and schedules that users register: Python, overrides, YAML, gin, messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from tests.builders import restore_registries
from tests.config_builders import collect_mistakes, override_setting
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.registration import (
    register_dataset,
    register_metric,
    register_optimizer,
    register_schedule,
)
from trainer_kit.config.resolve import ConfigSources, non_default_paths, resolve_config
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DatasetConfig, ExperimentConfig
from trainer_kit.config.schema.metric_configs import MetricConfig
from trainer_kit.config.schema.optimizer_configs import BaseOptimizerConfig, OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.errors import UsageError

OPTIMIZATION = "trainer.optimizer_config"


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
    choices = (OptimizerConfig, LrConfig, DatasetConfig, MetricConfig)
    with restore_registries(*(choice.registry for choice in choices)):
        register_optimizer("lookahead", LookaheadConfig)(
            lambda config, learning_rate: (config, learning_rate)
        )
        register_schedule("flat")(lambda config: 0.5)
        yield


def test_a_registered_optimizer_is_set_like_a_built_in_one() -> None:
    config = OptimizerConfig(type="lookahead", lookahead=LookaheadConfig(sync_period=3))

    assert config.get() == config.lookahead == LookaheadConfig(sync_period=3)
    assert OptimizerConfig(type="lookahead", lookahead={"sync_period": 3}) == config
    assert OptimizerConfig(type="lookahead").get() == LookaheadConfig()
    assert OptimizerConfig().replace(type="lookahead", lookahead={"sync_period": 3}) == config
    assert config.replace(lookahead={"clipnorm": 1.0}).get() == LookaheadConfig(
        sync_period=3, clipnorm=1.0
    )
    assert config.replace(type="sgd").as_dict().keys() == {"type", "sgd"}
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_a_registered_optimizer_differs_from_an_older_default() -> None:
    defaults = ExperimentConfig()
    register_optimizer("lookbehind", LookaheadConfig)(lambda config, rate: (config, rate))
    config = override_setting(f"{OPTIMIZATION}.optimizer.type=lookbehind")

    paths = list(non_default_paths(config, defaults))

    assert f"{OPTIMIZATION}.optimizer.type" in paths


def test_overrides_choose_a_registered_optimizer_and_schedule() -> None:
    optimizer = (
        f"{OPTIMIZATION}.optimizer.type=lookahead,{OPTIMIZATION}.optimizer.lookahead.sync_period=2"
    )
    config = override_setting(f"{optimizer},{OPTIMIZATION}.learning_rate.type=flat")

    assert config.trainer.optimizer_config.optimizer.get() == LookaheadConfig(sync_period=2)
    assert from_yaml(to_yaml(config), ExperimentConfig(task=type(config.task)())) == config


def test_gin_binds_a_registered_optimizer_by_its_config_class(name: str) -> None:
    register_experiment(name)(ExperimentConfig)
    bindings = (
        "OptimizerConfig.type = 'lookahead'",
        "LookaheadConfig.sync_period = 2",
        "LrConfig.type = 'flat'",
    )
    config = resolve_config(name, ConfigSources(gin_params=bindings)).config

    assert config.trainer.optimizer_config.optimizer.get() == LookaheadConfig(sync_period=2)


@pytest.mark.parametrize(
    ("setting", "path", "said"),
    [
        ("{type: lookahed}", "type", "did you mean lookahead?"),
        (
            "{type: lookahead, lookahead: {sync_perid: 2}}",
            "lookahead.sync_perid",
            "lookahead.sync_period?",
        ),
        (
            "{type: lookahead, lookahead: {sync_period: often}}",
            "lookahead.sync_period",
            "'often' is not a whole",
        ),
        ("{type: sgd, lookahed: {sync_period: 2}}", "lookahed", "no such"),
    ],
)
def test_a_mistake_in_a_registered_optimizer_has_its_path(
    setting: str, path: str, said: str
) -> None:
    mistake = collect_mistakes(override_setting, f"{OPTIMIZATION}.optimizer={setting}")[
        f"{OPTIMIZATION}.optimizer.{path}"
    ]

    assert said in str(mistake)


@pytest.mark.parametrize("taken", ["lookahead", "sgd", "type", "a/b", ""])
def test_an_optimizer_name_that_is_taken_or_no_name_is_refused(taken: str) -> None:
    with pytest.raises(UsageError):
        register_optimizer(taken)(lambda config, rate: None)


def test_the_section_of_a_schedule_has_to_be_a_configclass() -> None:
    class Plain(Config):
        pass

    with pytest.raises(UsageError, match="configclass"):
        register_schedule("plain", Plain)


def test_a_dataset_is_chosen_in_the_section_of_the_data() -> None:
    register_dataset("moons", LookaheadConfig)(lambda config, params: None)
    config = override_setting(
        "task.train_data.dataset={type: moons, moons: {sync_period: 4}}", ExperimentConfig()
    )

    assert config.task.train_data.dataset.get() == LookaheadConfig(sync_period=4)
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config


def test_metrics_are_a_list_of_registered_ones_and_keras_own() -> None:
    register_metric("f1", LookaheadConfig)(lambda config: None)
    metrics = (
        "trainer.metrics=[{type: f1, f1: {sync_period: 4}}, {type: keras, keras: {metric: AUC}}]"
    )
    config = override_setting(metrics, ExperimentConfig())
    first, second = config.trainer.metrics

    assert first.get() == LookaheadConfig(sync_period=4)
    assert second.get().metric == "AUC"
    assert from_yaml(to_yaml(config), ExperimentConfig()) == config
    assert "one of keras, f1" in str(
        collect_mistakes(override_setting, "trainer.metrics=[{type: f2}]")["trainer.metrics.0.type"]
    )


def test_a_schedule_of_a_notebook_may_be_registered_again() -> None:
    for _ in range(2):
        build = type("Cell", (), {"__module__": "__main__"})
        register_schedule("cell")(build)
        assert LrConfig.registry.lookup("cell").build is build
