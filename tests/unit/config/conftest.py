"""The sample experiment of tests.config_builders, as a config and under a registered name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.config_builders import sample_experiment
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import gin_source

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _unbound_gin() -> Iterator[None]:
    """Leaves gin without bindings, as each run has a process."""
    yield
    if "gin" in sys.modules:
        sys.modules["gin"].clear_config()
        gin_source._bound_external_names.clear()


@pytest.fixture
def default() -> ExperimentConfig:
    """The default config of the sample experiment."""
    return sample_experiment()


@pytest.fixture
def name() -> str:
    """A name that no other test registers or imports."""
    return f"unused{next(_numbers)}"


@pytest.fixture
def register() -> Callable[[str], str]:
    """Registers the sample experiment under a new name, in which "{}" becomes a number."""

    def add(pattern: str) -> str:
        name = pattern.format(next(_numbers))
        register_experiment(name)(sample_experiment)
        return name

    return add


@pytest.fixture
def experiment(register: Callable[[str], str]) -> str:
    """The name of the sample experiment."""
    return register("sample_{}")
