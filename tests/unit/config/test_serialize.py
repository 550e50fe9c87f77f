"""A config as YAML, and back. Random configs are in test_round_trip.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import from_yaml, to_yaml, write_params
from trainer_kit.errors import ConfigError, StorageError


def test_sections_lists_choices_and_none_come_back_equal(default: ExperimentConfig) -> None:
    task = {
        "model": {"blocks": ({"width": 3}, {"kind": "conv"})},
        "extra_data": {"seed": 5},
        "named_data": {"a b": {"input_path": ("x", "y")}},
        "weights": (1e-7, 0.1 + 0.2),
        "train_data": {"input_path": {"en": "x", "de": ("y", "z")}},
    }
    trainer = {"optimizer_config": {"ema": {"average_decay": 0.5}}, "continuous_eval_timeout": None}
    config: Any = default.replace(task=task, trainer=trainer)

    again: Any = from_yaml(to_yaml(config), default)

    assert again == config
    assert type(again.task) is type(config.task)
    assert again.task.model.blocks == config.task.model.blocks
    assert again.task.weights[1].hex() == (0.1 + 0.2).hex()


@pytest.mark.parametrize("field", ["fuse_steps", "accumulate_steps", "executor"])
def test_auto_of_earlier_releases_counts_as_left_out(field: str, default: ExperimentConfig) -> None:
    text = re.sub(rf"\b{field}: \w+", f"{field}: auto", to_yaml(default))

    assert f"{field}: auto" in text
    assert from_yaml(text, default) == default


def test_a_default_that_the_text_changes_back_is_changed_back(default: ExperimentConfig) -> None:
    other = default.replace(
        trainer={"optimizer_config": {"ema": {"start_step": 3}}},
        task={"named_data": {"a": {"seed": 1}}},
    )

    assert from_yaml(to_yaml(default), other) == default


def test_of_a_choice_only_the_chosen_branch_is_written(default: ExperimentConfig) -> None:
    optimizer = yaml.safe_load(to_yaml(default))["trainer"]["optimizer_config"]["optimizer"]
    assert optimizer.keys() == {"type", "adam"}


def test_what_the_text_leaves_out_is_as_in_the_default(default: ExperimentConfig) -> None:
    assert from_yaml("trainer: {train_steps: 7}", default) == default.replace(
        trainer={"train_steps": 7}
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "trainer: {train_steps: x}\nruntime:\n  num_gpu: 1\n",
            r"params.yaml:1.*\n.*params.yaml:3.*num_gpus",
        ),
        ("- 1", "holds no config"),
        ("", "holds no config"),
        ("a: [1, 2\nb: 3\n", "params.yaml:2:2"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_with_its_lines(
    default: ExperimentConfig, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        from_yaml(text, default)


def test_params_are_written_whole(default: ExperimentConfig, tmp_path: Path) -> None:
    path = tmp_path / "run" / "params.yaml"

    write_params(path, default)

    assert from_yaml(path.read_text(), ExperimentConfig(task=type(default.task)())) == default
    assert [entry.name for entry in path.parent.iterdir()] == ["params.yaml"]

    with pytest.raises(StorageError):
        write_params(path / "below" / "params.yaml", default)
