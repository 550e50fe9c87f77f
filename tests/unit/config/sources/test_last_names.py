"""Fields that --params_override names by the last part of their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config_builders import rotate_both_ways, sample_experiment
from trainer_kit.config import merge
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import last_names
from trainer_kit.errors import ConfigError

SECTION = "trainer.optimizer_config"
SEVERAL = {"optimizer": "adam", "learning_rate": 0.1, "variables": ["a"]}


@register_experiment("last_names/one")
def _one() -> ExperimentConfig:
    return sample_experiment()


@register_experiment("last_names/several")
def _several() -> ExperimentConfig:
    optimizers = dict.fromkeys(("c", "a", "b", "e", "d", "f"), SEVERAL)
    return ExperimentConfig(trainer={"optimizers": optimizers})


def _resolve(*overrides: str, experiment: str = "last_names/one") -> ExperimentConfig:
    return resolve_config(experiment, ConfigSources(params_overrides=overrides)).config


def test_learning_rate_sets_the_base_rate_of_the_chosen_schedule() -> None:
    constant = _resolve("learning_rate=3e-4").trainer.optimizer_config.learning_rate
    assert constant.constant.learning_rate == 3e-4

    cosine = _resolve("schedule=cosine", "learning_rate=3e-4").trainer.optimizer_config
    assert cosine.learning_rate.cosine.initial_learning_rate == 3e-4


def test_unique_names_of_fields_and_sections_find_their_place() -> None:
    override = "train_steps=7,warmup=null,ema={average_decay: 0.5},train_data.global_batch_size=3"

    config = _resolve(override, "average_decay=0.25")

    assert config.trainer.train_steps == 7
    assert config.trainer.optimizer_config.ema.average_decay == 0.25
    assert config.task.train_data.global_batch_size == 3


def test_a_file_decides_which_fields_the_config_has(tmp_path: Path) -> None:
    file = tmp_path / "cosine.yaml"
    file.write_text("trainer: {optimizer_config: {schedule: cosine, learning_rate: 1e-3}}")
    sources = ConfigSources(config_files=(str(file),), params_overrides=("alpha=0.5",))

    resolved = resolve_config("last_names/one", sources)

    path = f"{SECTION}.learning_rate.cosine.alpha"
    assert resolved.config.trainer.optimizer_config.learning_rate.cosine.alpha == 0.5
    assert resolved.origins[path] == "--params_override"


def test_whole_paths_win_and_count_first() -> None:
    config = _resolve(f"learning_rate=0.5,{SECTION}.schedule=one_cycle")
    assert config.trainer.optimizer_config.learning_rate.one_cycle.max_learning_rate == 0.5

    # A section of an experiment is never the last name of another field.
    assert _resolve("runtime={virtual_cpus: 2}").runtime.virtual_cpus == 2


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (
            ["optimizer=sgd", "momentum=0.9", "learning_rate=0.1", "schedule=cosine", "alpha=0.5"],
            "{optimizer: {type: sgd, sgd: {momentum: 0.9}}, learning_rate: {type: cosine, cosine:"
            " {initial_learning_rate: 0.1, decay_steps: 100 %, alpha: 0.5}}}",
        ),
        (
            ["schedule=exponential", "initial_learning_rate=1", "decay_rate=0.9", "decay_steps=5"],
            "{learning_rate: {type: exponential, exponential:"
            " {initial_learning_rate: 1, decay_rate: 0.9, decay_steps: 5}}}",
        ),
        (
            [
                "warmup=.5 epochs",
                "warmup_learning_rate=0.1",
                "ema={start_step: 5}",
                "trainable_weights_only=false",
            ],
            "{warmup: {linear: {warmup_steps: .5 epochs, warmup_learning_rate: 0.1}, type: linear},"
            " ema: {start_step: 5, trainable_weights_only: false}}",
        ),
        (
            ["learning_rate=0.5", f"{SECTION}.schedule=one_cycle", "pct_start=0.1"],
            "{learning_rate: {type: one_cycle, one_cycle:"
            " {max_learning_rate: 0.5, total_steps: 100 %, pct_start: 0.1}}}",
        ),
        (
            ["schedule=one_cycle", f"{SECTION}.learning_rate=0.5"],
            "{learning_rate: {type: one_cycle, one_cycle:"
            " {max_learning_rate: 0.5, total_steps: 100 %}}}",
        ),
        (
            [
                "learning_rate=cosine",
                f"{SECTION}.learning_rate.cosine={{decay_steps: 7}}",
                "initial_learning_rate=1",
            ],
            "{learning_rate: {type: cosine, cosine: {initial_learning_rate: 1, decay_steps: 7}}}",
        ),
        (
            ["nesterov=true", "sgd={momentum: 0.9}", f"{SECTION}.optimizer=sgd"],
            "{optimizer: {type: sgd, sgd: {momentum: 0.9, nesterov: true}}}",
        ),
    ],
)
def test_the_order_of_an_override_changes_nothing(short: list[str], long: str) -> None:
    expected = _resolve(f"{SECTION}={long}")

    for parts in rotate_both_ways(short):
        assert _resolve(",".join(parts)) == expected, parts


def test_several_fields_of_a_name_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve("learning_rate=0.1", experiment="last_names/several")

    assert str(caught.value) == (
        "learning_rate (--params_override): several fields have this name; write the whole path;"
        " there are: trainer.optimizer_config.learning_rate, trainer.optimizers.a.learning_rate,"
        " trainer.optimizers.b.learning_rate, trainer.optimizers.c.learning_rate,"
        " trainer.optimizers.d.learning_rate, ... (7 in all)"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rat=3", "did you mean learning_rate?"),
        ("train_step=3", "there is no such key; did you mean train_steps"),
        ("traine.train_steps=3", "did you mean trainer?"),
        ("xyzzy=3", "there is no such key; there are: "),
        ("{5: 3}", "5 (--params_override): there is no such key"),
        ('{"trainer.train_steps": 3}', "nest the keys"),
        ("sgd={momentum: 0.5}", "has no effect while trainer.optimizer_config.optimizer.type is"),
    ],
)
def test_a_name_of_no_field_is_refused_with_near_names(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(override)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "train_steps=5,trainer.train_steps=7",
        "trainer.train_steps=7,train_steps=5",
        "{train_steps: 5, trainer: {train_steps: 7}}",
    ],
)
def test_a_field_by_both_its_names_is_given_twice(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(override)

    assert str(caught.value) == (
        "train_steps (--params_override): is given twice; keep one; there are: trainer.train_steps"
    )


def test_many_names_take_few_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = []

    def merge_layers(*args: Any) -> Any:
        merges.append(args)
        return merge.merge_layers(*args)

    monkeypatch.setattr(last_names, "merge_layers", merge_layers)
    names = ("train_steps", "steps_per_loop", "summary_interval", "checkpoint_interval")

    _resolve("optimizer=sgd,momentum=0.9," + ",".join(f"{name}=4" for name in names))

    assert len(merges) == 3


def test_mistakes_of_other_sources_do_not_hide_a_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("trainer: {train_steps: many}")
    sources = ConfigSources(config_files=(str(file),), params_overrides=("learning_rate=-1",))

    with pytest.raises(ConfigError) as caught:
        resolve_config("last_names/one", sources)

    paths = [mistake.path for mistake in caught.value.mistakes]
    assert paths == ["trainer.train_steps", f"{SECTION}.learning_rate.constant.learning_rate"]
