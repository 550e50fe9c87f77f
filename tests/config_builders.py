"""Configs for tests: a sample experiment, settings in text, and the mistakes of what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from trainer_kit.config.merge import ResolvedConfig, apply_layers
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import (
    DataConfig,
    ExperimentConfig,
    TaskConfig,
    TrainerConfig,
)
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.config.schema.schedules import ConstantLrConfig, LrConfig
from trainer_kit.config.schema.section import FieldError
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError, Mistake


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
    """A task with a section, a list of sections, and several sections of data."""

    model: NetConfig = NetConfig()
    extra_data: DataConfig | None = None
    named_data: dict[str, DataConfig] = Field(default_factory=dict)
    weights: tuple[float, ...] = (1.0, 2.5)


def sample_experiment(learning_rate: float = 0.1, steps: int = 100) -> ExperimentConfig:
    """Returns the config of the sample experiment."""
    constant = ConstantLrConfig(learning_rate=learning_rate)
    optimization = OptimizationConfig(
        optimizer=OptimizerConfig(type="adam"),
        learning_rate=LrConfig(type="constant", constant=constant),
    )
    trainer = TrainerConfig(train_steps=steps, optimizer_config=optimization)
    return ExperimentConfig(task=SampleTaskConfig(), trainer=trainer)


def nest_value(path: str, value: Any) -> dict[str, Any]:
    """Returns `value` at a dotted path: {"a": {"b": 1}} for "a.b" and 1."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def override_setting(setting: str, config: ExperimentConfig | None = None) -> ExperimentConfig:
    """Returns the sample experiment, or `config`, with one --params_override."""
    return apply_layers(config or sample_experiment(), [read_params_override(setting)]).config


def apply_values(config: ExperimentConfig, *layers: dict[str, Any]) -> ResolvedConfig:
    """Returns `config` with layers of values, whose origins are "layer 0", "layer 1" and so on."""
    sources = []
    for number, values in enumerate(layers):
        sources.append(ConfigLayer(values, dict.fromkeys(values, f"layer {number}")))

    return apply_layers(config, sources)


def rotate_both_ways(items: Iterable[Any]) -> list[list[Any]]:
    """Returns orders of `items` among which any three of them come in each of their orders."""
    forward = list(items)
    backward = forward[::-1]
    return [
        [*order[begin:], *order[:begin]]
        for order in (forward, backward)
        for begin in range(len(order))
    ]


def collect_mistakes(
    build: Callable[..., object], *arguments: Any, **named: Any
) -> dict[str, Mistake]:
    """Returns the mistakes with which `build` refuses its arguments, by their paths."""
    with pytest.raises(ConfigError) as error:
        build(*arguments, **named)
    mistakes = {mistake.path: mistake for mistake in error.value.mistakes}
    assert len(mistakes) == len(error.value.mistakes), error.value
    return mistakes


# The name that tests/process uses.


def wrong_fields(config_class: type[Config], values: dict[str, Any]) -> list[str]:
    """Returns the fields of a section, by their paths inside it, that refuse `values`."""
    with pytest.raises(FieldError) as error:
        config_class(**values)
    return [mistake.path for mistake in error.value.relative_mistakes]
