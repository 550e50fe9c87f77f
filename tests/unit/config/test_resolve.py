"""All sources together: their order, their origins, one report, and no TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config_builders import collect_mistakes
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.config.fields import flatten_values
from trainer_kit.config.resolve import ConfigSources, list_resolved_values, resolve_config
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError

ROOT = Path(__file__).parents[3]


def write_text(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_each_source_wins_over_those_before_it(experiment: str, tmp_path: Path) -> None:
    first = write_text(tmp_path, "a.yaml", "trainer: {train_steps: 2}")
    second = write_text(tmp_path, "b.yaml", "trainer: {train_steps: 3}")
    third = write_text(tmp_path, "c.gin", "TrainerConfig.train_steps = 4")
    flags = ConfigLayer({"trainer": {"train_steps": 8}}, {"trainer.train_steps": "--train_steps"})
    sources = [
        ("gin_params", f"{experiment}.steps = 1", f"{experiment}.steps of --gin_params"),
        ("config_files", first, f"{first}:1"),
        ("config_files", second, f"{second}:1"),
        ("gin_files", third, f"{third}:1"),
        ("gin_params", "TrainerConfig.train_steps = 5", "--gin_params"),
        ("params_overrides", "trainer.train_steps=6", "--params_override"),
        ("params_overrides", "{trainer: {train_steps: 7}}", "--params_override"),
    ]
    fields: dict[str, Any] = {}

    for steps, (field, text, origin) in enumerate(sources, start=1):
        fields[field] = (*fields.get(field, ()), text)
        resolved = resolve_config(experiment, ConfigSources(**fields))
        assert resolved.config.trainer.train_steps == steps
        assert resolved.origins["trainer.train_steps"] == origin

    resolved = resolve_config(experiment, ConfigSources(**fields, flags=flags))

    assert resolved.config.trainer.train_steps == 8
    assert resolved.origins["trainer.train_steps"] == "--train_steps"


def test_the_mistakes_of_all_sources_are_one_report(experiment: str, tmp_path: Path) -> None:
    sources = ConfigSources(
        config_files=(
            write_text(tmp_path, "typo.yaml", "trainer:\n  train_step: 5\n"),
            write_text(tmp_path, "broken.yaml", "a: ["),
            str(tmp_path / "missing.yaml"),
        ),
        gin_files=(write_text(tmp_path, "broken.gin", "a b"),),
        gin_params=("NetConfig.rate = 7", "validation_dta/DataConfig.seed = 1"),
        params_overrides=("runtime.num_gpu=1", "trainer.train_steps", "trainer.validation_steps=0"),
        flags=ConfigLayer({"runtime": {"tpu": 5}}, {"runtime.tpu": "--tpu"}),
    )

    with pytest.raises(ConfigError) as caught:
        resolve_config(experiment, sources)

    mistakes = {
        (mistake.path, mistake.origin.removeprefix(f"{tmp_path}/"))
        for mistake in caught.value.mistakes
    }
    assert mistakes == {
        ("trainer.train_step", "typo.yaml:2"),
        ("", "broken.yaml:1:5"),
        ("", "missing.yaml"),
        ("", "broken.gin:1"),
        ("task.model.rate", "--gin_params"),
        ("validation_dta/DataConfig.seed", "--gin_params"),
        ("runtime.num_gpu", "--params_override"),
        ("", "--params_override"),
        ("trainer.validation_steps", "--params_override"),
        ("runtime.tpu", "--tpu"),
    }


@pytest.mark.parametrize(
    ("gin", "overrides", "paths"),
    [
        (
            "TrainrConfig.a = 1\nTrainerConfig.train_steps = 'x'",
            (),
            {"TrainrConfig.a", "trainer.train_steps"},
        ),
        (
            "TrainrConfig.a = 1\nTrainerConfig.train_steps = %n",
            (),
            {"TrainrConfig.a", "TrainerConfig.train_steps"},
        ),
        ("TrainerConfig.a = 1\nTrainerConfig.b = 1", (), {"trainer.a", "trainer.b"}),
        ("TrainrConfig.a = 1", ("trainer.x=5",), {"TrainrConfig.a", "trainer.x"}),
        # A module that is imported later may register it.
        ("mine.Net.a = 1", ("trainer.x=5",), {"trainer.x"}),
    ],
)
def test_two_mistakes_of_gin_are_reported_together(
    gin: str, overrides: tuple[str, ...], paths: set[str], experiment: str, tmp_path: Path
) -> None:
    sources = ConfigSources(
        gin_files=(write_text(tmp_path, "a.gin", gin),), params_overrides=overrides
    )
    mistakes = collect_mistakes(resolve_config, experiment, sources)

    assert mistakes.keys() == paths
    assert "TrainrConfig" not in gin or "did you mean TrainerConfig?" in str(
        mistakes["TrainrConfig.a"]
    )


@pytest.mark.parametrize("gin_params", [(), ("TrainerConfig.train_steps = 5",)])
def test_unknown_experiments_and_unreadable_sources_are_reported(
    experiment: str, gin_params: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(
            f"{experiment}x", ConfigSources(config_files=("missing.yaml",), gin_params=gin_params)
        )

    assert experiment in str(caught.value)
    assert "missing.yaml" in str(caught.value)


def test_a_description_lists_every_value_with_its_origin(experiment: str) -> None:
    overrides = (
        "task.model.rate=0.25,trainer.max_to_keep=5,trainer.optimizer_config.optimizer={type: sgd}",
    )
    resolved = resolve_config(experiment, ConfigSources(params_overrides=overrides))

    described = list_resolved_values(resolved)

    assert [path for path, _, _ in described] == list(flatten_values(resolved.config))
    assert ("task.model.rate", 0.25, "--params_override") in described
    assert ("trainer.steps_per_loop", 1000, "default") in described

    different = {path for path, _, _ in list_resolved_values(resolved, get_experiment(experiment))}
    assert "trainer.optimizer_config.optimizer.sgd.momentum" in different
    assert not {"trainer.steps_per_loop", "trainer.max_to_keep"} & different


def test_resolving_without_gin_imports_no_tensorflow_or_gin() -> None:
    code = (
        "import sys\n"
        "from trainer_kit.config.resolve import ConfigSources, resolve_config\n"
        "from trainer_kit.config import resume_check, serialize\n"
        "from trainer_kit.config.sources import gin_source\n"
        "from trainer_kit.config.schema.experiment import ExperimentConfig\n"
        "from trainer_kit.config.experiment_registry import register_experiment\n"
        "register_experiment('a')(ExperimentConfig)\n"
        "resolved = resolve_config('a', "
        "ConfigSources(params_overrides=('trainer.train_steps=5',)))\n"
        "text = serialize.to_yaml(resolved.config)\n"
        "again = serialize.from_yaml(text, ExperimentConfig())\n"
        "assert resume_check.check_resume(text, again, []) == []\n"
        "assert gin_source.get_operative_gin_config() == ''\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "heavy = {'tensorflow', 'keras', 'tf_keras', 'orbit', 'numpy'}\n"
        "print(sorted(roots & {*heavy, 'gin', 'absl'}))\n"
        "resolve_config('a', ConfigSources(gin_params=('TrainerConfig.train_steps = 5',)))\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & heavy))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )

    assert done.stdout == "[]\n[]\n"
