"""Short forms of optimizers, schedules and warm-ups, from every source of config values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.builders import restore_registries
from tests.config_builders import rotate_both_ways
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.registration import register_schedule
from trainer_kit.config.resolve import ConfigSources, list_resolved_values, resolve_config
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.durations import Duration
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError

SECTION = "trainer.optimizer_config"
SHORT = {"optimizer": "adamw", "learning_rate": 1e-3, "schedule": "cosine", "warmup": "5 %"}
LONG = {
    "optimizer": {"type": "adamw"},
    "learning_rate": {
        "type": "cosine",
        "cosine": {"initial_learning_rate": 1e-3, "decay_steps": "100 %"},
    },
    "warmup": {"type": "linear", "linear": {"warmup_steps": "5 %"}},
}
YAML = """\
trainer:
  train_steps: 100
  optimizer_config:
    optimizer: adamw
    learning_rate: 1e-3
    schedule: cosine
    warmup: "5 %"
"""
_numbers = itertools.count()


@configclass
class _PathsConfig(TaskConfig):
    folder: str = ""
    folders: tuple[str, ...] = ()
    anything: Any = None


@pytest.fixture
def name() -> str:
    """The name of an experiment whose config is the default."""
    name = f"short_forms_{next(_numbers)}"

    @register_experiment(name)
    def create() -> ExperimentConfig:
        return ExperimentConfig(task=_PathsConfig(), trainer={"train_steps": 100})

    return name


def _optimization(**values: Any) -> OptimizationConfig:
    return ExperimentConfig(trainer={"optimizer_config": values}).trainer.optimizer_config


def test_every_source_expands_short_forms_to_the_same_params(name: str, tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text(YAML)
    bindings = tuple(f"OptimizationConfig.{key} = {value!r}" for key, value in SHORT.items())
    override = ",".join(f"{SECTION}.{key}={value}" for key, value in SHORT.items())
    base = resolve_config(name, ConfigSources()).config

    configs = {
        "long": base.replace(trainer={"optimizer_config": LONG}),
        "constructor": ExperimentConfig(
            task=_PathsConfig(), trainer={"train_steps": 100, "optimizer_config": SHORT}
        ),
        "section": base.replace(trainer={"optimizer_config": OptimizationConfig(**SHORT)}),
        "replace": base.replace(trainer={"optimizer_config": SHORT}),
        "file": resolve_config(name, ConfigSources(config_files=(str(file),))).config,
        "gin": resolve_config(name, ConfigSources(gin_params=bindings)).config,
        "override": resolve_config(name, ConfigSources(params_overrides=(override,))).config,
    }

    expected = to_yaml(configs["long"])
    assert "decay_steps: 100 %" in expected
    for source, config in configs.items():
        assert to_yaml(config) == expected, source
    assert from_yaml(expected, base) == configs["long"]


def test_short_forms_may_be_in_any_order(name: str, tmp_path: Path) -> None:
    base = resolve_config(name, ConfigSources()).config
    expected = to_yaml(base.replace(trainer={"optimizer_config": LONG}))
    file = tmp_path / "short.yaml"

    for items in rotate_both_ways(SHORT.items()):
        values = dict(items)
        file.write_text(yaml_loader.dump({"trainer": {"optimizer_config": values}}))
        bindings = tuple(f"OptimizationConfig.{key} = {value!r}" for key, value in items)
        last_names = ",".join(f"{key}={value}" for key, value in items)
        paths = ",".join(f"{SECTION}.{key}={value}" for key, value in items)
        for sources in (
            ConfigSources(config_files=(str(file),)),
            ConfigSources(gin_params=bindings),
            ConfigSources(params_overrides=(last_names,)),
            ConfigSources(params_overrides=(paths,)),
        ):
            assert to_yaml(resolve_config(name, sources).config) == expected, sources
        assert to_yaml(base.replace(trainer={"optimizer_config": values})) == expected, values


def test_expanded_values_have_the_line_of_their_short_form(name: str, tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text(YAML)

    resolved = resolve_config(name, ConfigSources(config_files=(str(file),)))

    origins = {path: origin for path, _, origin in list_resolved_values(resolved)}
    assert origins[f"{SECTION}.optimizer.type"] == f"{file}:4"
    assert origins[f"{SECTION}.optimizer.adamw.beta_1"] == "default"
    assert origins[f"{SECTION}.learning_rate.cosine.initial_learning_rate"] == f"{file}:5"
    assert origins[f"{SECTION}.learning_rate.type"] == f"{file}:6"
    assert origins[f"{SECTION}.learning_rate.cosine.decay_steps"] == f"{file}:6"
    assert origins[f"{SECTION}.warmup.linear.warmup_steps"] == f"{file}:7"


def test_a_number_is_the_base_rate_of_the_chosen_schedule() -> None:
    constant = _optimization(optimizer="sgd", learning_rate=0.1)

    one_cycle = constant.replace(schedule="one_cycle", learning_rate=0.5).learning_rate
    assert one_cycle.one_cycle.max_learning_rate == 0.5
    assert one_cycle.one_cycle.total_steps == "100 %"

    changed = OptimizationConfig(optimizer="sgd", learning_rate=one_cycle).replace(learning_rate=2)
    assert changed.learning_rate.type == "one_cycle"
    assert changed.learning_rate.one_cycle.max_learning_rate == 2


def test_a_schedule_with_defaults_needs_only_its_name() -> None:
    section = OptimizationConfig(optimizer="sgd", schedule="constant")
    assert section.learning_rate.constant.learning_rate == 0.1


def test_the_schedule_that_is_chosen_already_keeps_its_settings() -> None:
    cosine = {"type": "cosine", "cosine": {"initial_learning_rate": 0.1, "decay_steps": 7}}
    before = _optimization(optimizer="sgd", learning_rate=cosine)

    assert before.replace(schedule="cosine") == before
    settings = before.replace(schedule="cosine", learning_rate={"cosine": {"alpha": 0.5}})
    assert settings.learning_rate.cosine.decay_steps == 7
    assert settings.learning_rate.cosine.alpha == 0.5


def test_a_warm_up_takes_steps_or_a_duration_of_any_form() -> None:
    warmup = _optimization(warmup=500).warmup
    assert (warmup.type, warmup.linear.warmup_steps) == ("linear", 500)

    polynomial = {"type": "polynomial", "polynomial": {"warmup_steps": 5, "power": 2.0}}
    changed = _optimization(warmup=polynomial).replace(warmup="2 epochs").warmup
    assert (changed.type, changed.polynomial.power) == ("polynomial", 2.0)
    assert changed.polynomial.warmup_steps == "2 epochs"

    for text in (".5 epochs", " 5 %", "0.5 epochs"):
        assert _optimization(warmup=text).warmup.linear.warmup_steps == text
    halves = [Duration.parse(text) for text in (".5 epochs", "0.5 epochs")]
    assert [half.amount for half in halves if half] == [0.5, 0.5]


def test_null_switches_off_a_choice_as_it_does_a_section() -> None:
    before = _optimization(**SHORT, ema={})

    after = before.replace(optimizer=None, learning_rate=None, warmup=None, ema=None)
    assert (after.optimizer.type, after.learning_rate.type, after.warmup.type) == (None,) * 3
    assert after.ema is None
    assert _optimization(warmup=None).warmup.type is None


def test_sections_by_name_and_in_lists_take_short_forms() -> None:
    optimizers = {
        "one": {"optimizer": "adam", "learning_rate": 0.1},
        "two": {"optimizer": "sgd", "learning_rate": 0.2, "schedule": "polynomial"},
    }
    trainer = ExperimentConfig(trainer={"optimizers": optimizers}).trainer
    assert trainer.optimizers["one"].learning_rate.constant.learning_rate == 0.1
    assert trainer.optimizers["two"].learning_rate.polynomial.initial_learning_rate == 0.2

    processors = _optimization(**SHORT, gradient_processors=["centralize"]).gradient_processors
    assert [processor.type for processor in processors] == ["centralize"]


def test_a_registered_schedule_has_a_short_form() -> None:
    @configclass
    class SawConfig(Config):
        learning_rate: float = 0.3
        decay_steps: int = 20

    with restore_registries(LrConfig.registry):
        register_schedule("saw", SawConfig)(print)
        rate = _optimization(optimizer="sgd", schedule="saw", learning_rate=0.7).learning_rate

    assert rate.saw == SawConfig(learning_rate=0.7)


MISTAKES = {
    "optimizer: adamww": ("optimizer.type", "did you mean adamw"),
    "optimizer: 5": ("optimizer", "5 is not a section; give its fields (type, sgd, adam"),
    "schedule: cosin": ("learning_rate.type", "did you mean cosine?"),
    "schedule: 0.1": ("learning_rate.type", "0.1 is not one of constant"),
    "learning_rate: fast": ("learning_rate.type", "'fast' is not one of constant"),
    "learning_rate: -1": ("learning_rate.constant.learning_rate", "of at least 0"),
    'learning_rate: "1e-3"': ("learning_rate.constant.learning_rate", "1e-3 without quotes"),
    "warmup: 5 stepz": ("warmup.linear.warmup_steps", "a duration such as '3 epochs'"),
    "warmup: 120 %": ("warmup.linear.warmup_steps", "at most 100 %"),
    "warmup: 5 min": ("warmup.linear.warmup_steps", "'5 min' is not a whole number"),
    "warmup: -.5 epochs": ("warmup.linear.warmup_steps", "'-.5 epochs' is not a whole number"),
    "warmup: [5]": ("warmup.linear.warmup_steps", "[5] is not a whole number"),
    "schedul: cosine": ("schedul", "did you mean trainer.optimizer_config.schedule?"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_in_a_short_form_is_one_line(line: str, name: str, tmp_path: Path) -> None:
    path, said = MISTAKES[line]
    file = tmp_path / "wrong.yaml"
    file.write_text(f"trainer:\n  optimizer_config:\n    {line}\n")

    with pytest.raises(ConfigError) as caught:
        resolve_config(name, ConfigSources(config_files=(str(file),)))

    message = str(caught.value)
    assert message.startswith(f"{SECTION}.{path} ({file}:3): ")
    assert said in message
    assert "\n" not in message


def test_a_schedule_without_a_base_rate_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cosine.initial_learning_rate .*; give it a number$"):
        resolve_config(name, ConfigSources(params_overrides=("schedule=cosine",)))


def test_python_refuses_a_wrong_short_form_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.optimizer_config.learning_rate.type: 'cosin'"):
        _optimization(schedule="cosin")
    with pytest.raises(ConfigError, match=r"OptimizationConfig.optimizer.type: 'adamww' is not"):
        OptimizationConfig(optimizer="adamww", learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"learning_rate.cosine.initial_learning_rate: is needed"):
        OptimizationConfig(optimizer="sgd", schedule="cosine")


def test_a_text_of_the_config_may_begin_with_the_home(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    task = _PathsConfig(folder="~/data", folders=["~/a", "b~/c"])
    override = "task.folder=~/data,task.train_data.input_path=~/x.tfrecord"
    resolved = resolve_config(name, ConfigSources(params_overrides=(override,))).config

    assert task.folder == resolved.task.folder == "/home/me/data"
    assert task.folders == ("/home/me/a", "b~/c")
    assert resolved.task.train_data.input_path == "/home/me/x.tfrecord"


def test_a_path_of_the_home_may_come_where_anything_may(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "copy.yaml"
    file.write_text("trainer: {callbacks: [{name: jsonl_copy, args: {folder: ~/copies, n: 3}}]}")

    resolved = resolve_config(name, ConfigSources(config_files=(str(file),))).config

    assert resolved.trainer.callbacks[0].args == {"folder": "/home/me/copies", "n": 3}
    assert _PathsConfig(anything="~/data").anything == "/home/me/data"


def test_the_home_is_not_looked_for_inside_a_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "freeze.yaml"
    file.write_text("trainer: {freeze: ['^a=~/b', 'a,~/b']}")

    resolved = resolve_config(name, ConfigSources(config_files=(str(file),))).config

    assert resolved.trainer.freeze == ("^a=~/b", "a,~/b")
