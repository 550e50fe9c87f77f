"""What a factory gives its config classes wrongly is told as any other mistake in a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic import dataclasses as foreign

from tests.config_builders import NetConfig, SampleTaskConfig, collect_mistakes
from trainer_kit.config.experiment_registry import get_experiment, register_experiment
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig

Factory = Callable[[], Any]


def wrong() -> ExperimentConfig:
    """A factory with a name of its own."""
    return ExperimentConfig(trainer={"train_step": 5})


def test_a_mistake_has_its_path_a_near_name_and_the_factory(name: str) -> None:
    register_experiment(name)(wrong)
    mistake = collect_mistakes(get_experiment, name)["trainer.train_step"]

    assert str(mistake) == (
        f"trainer.train_step ({__name__}.wrong): there is no such key; did you mean "
        "trainer.train_steps?"
    )


@pytest.mark.parametrize(
    ("factory", "paths"),
    [
        (lambda: TrainerConfig(train_step=5), {"trainer.train_step"}),
        (lambda: ExperimentConfig(train_steps=3), {"train_steps"}),
        (lambda: ExperimentConfig(trainer=RuntimeConfig()), {"trainer"}),
        (lambda: ExperimentConfig(5), {""}),
        (lambda: SampleTaskConfig(model={"rat": 1.0}), {"task.model.rat"}),
        (
            lambda: SampleTaskConfig(model={"blocks": [{}, {"width": 0}]}),
            {"task.model.blocks.1.width"},
        ),
        (lambda: NetConfig(rate=2.0), {"NetConfig.rate"}),  # it may be anywhere in a task
        (
            lambda: ExperimentConfig(
                trainer={"a": 1, "train_steps": "x"}, runtime={"num_gpus": -1}
            ),
            {"trainer.a", "trainer.train_steps", "runtime.num_gpus"},
        ),
    ],
)
def test_mistakes_in_any_section_are_told_with_their_paths(
    factory: Factory, paths: set[str], name: str
) -> None:
    register_experiment(name)(factory)
    assert collect_mistakes(get_experiment, name).keys() == paths


@pytest.mark.parametrize("gin_params", [(), ("TrainerConfig.train_steps = 5",)])
def test_resolving_tells_it_beside_other_mistakes(gin_params: tuple[str, ...], name: str) -> None:
    register_experiment(name)(wrong)
    mistakes = collect_mistakes(
        resolve_config, name, ConfigSources(config_files=("none.yaml",), gin_params=gin_params)
    )

    assert mistakes["trainer.train_step"].advice == "did you mean trainer.train_steps?"
    assert mistakes[""].origin == "none.yaml"


class _Theirs(BaseModel):
    size: int


@foreign.dataclass
class _TheirDataclass:
    size: int


@pytest.mark.parametrize("theirs", [_Theirs, _TheirDataclass])
def test_a_pydantic_class_of_the_users_own_keeps_its_error(
    theirs: Callable[..., Any], name: str
) -> None:
    register_experiment(name)(lambda: theirs(size="x"))
    with pytest.raises(ValidationError):
        get_experiment(name)
