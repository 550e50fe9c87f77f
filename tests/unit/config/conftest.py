"""A small experiment to configure: a task with a model section, a list of sections, and several data sections."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import pytest
from pydantic import Field

from trainer_kit.config.experiments import register_experiment
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig, TrainerConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizers import OptimizerConfig
from trainer_kit.config.schema.schedules import ConstantLrConfig, LrConfig
from trainer_kit.config.sources import gin_source

_numbers = itertools.count()


@configclass
class BlockConfig(Config):
    width: Annotated[int, Field(ge=1)] = 8
    kind: Literal["dense", "conv"] = "dense"


@configclass
class NetConfig(Config):
    blocks: tuple[BlockConfig, ...] = (BlockConfig(),)
    rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    name: str = "net"


@configclass
class SampleTaskConfig(TaskConfig):
    model: NetConfig = NetConfig()
    extra_data: DataConfig | None = None
    named_data: dict[str, DataConfig] = Field(default_factory=dict)
    weights: tuple[float, ...] = (1.0, 2.5)


def sample_experiment(learning_rate: float = 0.1, steps: int = 100) -> ExperimentConfig:
    """Makes the default config."""
    return ExperimentConfig(
        task=SampleTaskConfig(),
        trainer=TrainerConfig(
            train_steps=steps,
            optimizer_config=OptimizationConfig(
                optimizer=OptimizerConfig(type="adam"),
                learning_rate=LrConfig(type="constant", constant=ConstantLrConfig(learning_rate=learning_rate)),
            ),
        ),
    )


@pytest.fixture(autouse=True)
def _unbound_gin() -> Iterator[None]:
    """Leaves gin without bindings, as each run has a process."""
    yield
    if "gin" in sys.modules:
        sys.modules["gin"].clear_config()
        gin_source._bound.clear()


@pytest.fixture
def default() -> ExperimentConfig:
    """The default config of the sample experiment."""
    return sample_experiment()


@pytest.fixture
def register() -> Callable[[str], str]:
    """Registers the sample experiment under a name that no other test has, and returns it; "{}" becomes a number."""

    def add(pattern: str) -> str:
        name = pattern.format(next(_numbers))
        register_experiment(name)(sample_experiment)
        return name

    return add


@pytest.fixture
def experiment(register: Callable[[str], str]) -> str:
    """The name of the sample experiment."""
    return register("sample_{}")
