"""What a factory gives its config classes wrongly is told as any other mistake in a config."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic import dataclasses as foreign

from trainer_kit.config.experiments import get_experiment, register_experiment
from trainer_kit.config.resolve import Sources, resolve
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.config.schema.section import FieldError
from trainer_kit.errors import ConfigError, Mistake, UsageError

_numbers = itertools.count()
Factory = Callable[[], Any]


@configclass
class LayerConfig(Config):
    width: Annotated[int, Field(ge=1)] = 8


@configclass
class FactoryNetConfig(Config):
    layers: tuple[LayerConfig, ...] = (LayerConfig(),)
    rate: Annotated[float, Field(le=1)] = 0.5


@configclass
class FactoryTaskConfig(TaskConfig):
    model: FactoryNetConfig = FactoryNetConfig()


def _register(factory: Factory) -> str:
    name = f"made_{next(_numbers)}"
    register_experiment(name)(factory)
    return name


def _refused(factory: Factory) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        get_experiment(_register(factory))
    assert isinstance(caught.value.__cause__, FieldError)
    return list(caught.value.mistakes)


def test_a_sound_factory_gives_its_config(experiment: str) -> None:
    assert get_experiment(experiment) == get_experiment(experiment)  # each is a new one
    with pytest.raises(UsageError, match="no experiment is called"):
        get_experiment(f"{experiment}x")


def wrong() -> ExperimentConfig:
    """A factory with a name of its own."""
    return ExperimentConfig(trainer={"train_step": 5})


def test_a_mistake_has_its_path_a_near_name_and_the_factory() -> None:
    (mistake,) = _refused(wrong)
    assert str(mistake) == (
        f"trainer.train_step ({__name__}.wrong): there is no such key; did you mean trainer.train_steps?"
    )


@pytest.mark.parametrize(
    ("factory", "path", "said"),
    [
        (lambda: TrainerConfig(train_step=5), "trainer.train_step", "did you mean trainer.train_steps"),
        (lambda: ExperimentConfig().replace(trainer={"train_step": 5}), "trainer.train_step", "trainer.train_steps"),
        (lambda: ExperimentConfig(train_steps=3), "train_steps", "did you mean trainer.train_steps"),
        (lambda: ExperimentConfig(trainer={"train_steps": "5"}), "trainer.train_steps", "write 5 without quotes"),
        (lambda: ExperimentConfig(runtime=5), "runtime", "5 is not a section"),
        (lambda: ExperimentConfig(trainer=RuntimeConfig()), "trainer", "is not a section"),
        (lambda: ExperimentConfig(5), "", "5 is given without a name; write name=value"),
        (lambda: ExperimentConfig(trainer={"validation_steps": 0}), "trainer.validation_steps", "; use -1 for all"),
        (
            lambda: ExperimentConfig(runtime={"virtual_cpus": 3}, task={"train_data": {"global_batch_size": 32}}),
            "task.train_data.global_batch_size",
            "30 or 33",
        ),
        (
            lambda: ExperimentConfig(trainer={"optimizer_config": {"optimizer": {"type": "adma"}}}),
            "trainer.optimizer_config.optimizer.type",
            "did you mean adam",
        ),
        (lambda: FactoryTaskConfig(model={"rat": 1.0}), "task.model.rat", "did you mean task.model.rate"),
        (lambda: FactoryTaskConfig(model={"layers": [{}, {"width": 0}]}), "task.model.layers.1.width", "at least 1"),
        (lambda: FactoryTaskConfig(train_data={"input_path": 5}), "task.train_data.input_path", "5 is not text or"),
        (lambda: FactoryNetConfig(rate=2.0), "FactoryNetConfig.rate", "of at most 1"),  # it may be anywhere in a task
        (lambda: DataConfig(batch_size=4), "DataConfig.batch_size", "did you mean DataConfig.global_batch_size"),
    ],
)
def test_a_mistake_in_any_section_is_told_once_with_its_path(factory: Factory, path: str, said: str) -> None:
    (mistake,) = _refused(factory)
    assert mistake.path == path
    assert said in str(mistake)


def test_all_mistakes_of_one_class_are_told_at_once() -> None:
    mistakes = _refused(lambda: ExperimentConfig(trainer={"a": 1, "train_steps": "x"}, runtime={"num_gpus": -1}))
    assert {mistake.path for mistake in mistakes} == {"trainer.a", "trainer.train_steps", "runtime.num_gpus"}


@pytest.mark.parametrize("gin_params", [(), ("TrainerConfig.train_steps = 5",)])
def test_resolving_tells_it_beside_other_mistakes(gin_params: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(_register(wrong), Sources(config_files=("none.yaml",), gin_params=gin_params))
    assert "none.yaml" in str(caught.value) and "did you mean trainer.train_steps?" in str(caught.value)


class _Theirs(BaseModel):
    size: int


@foreign.dataclass
class _TheirDataclass:
    size: int


@pytest.mark.parametrize("theirs", [_Theirs, _TheirDataclass])
def test_a_pydantic_class_of_the_users_own_keeps_its_error(theirs: Callable[..., Any]) -> None:
    with pytest.raises(ValidationError):
        get_experiment(_register(lambda: theirs(size="x")))
