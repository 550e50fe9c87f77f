"""Calls an experiment's factory; config mistakes in it carry the factory's name."""

from __future__ import annotations

import dataclasses

from trainer_kit.config.experiments import experiments, get_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import FieldError
from trainer_kit.errors import ConfigError


def make_config(name: str) -> ExperimentConfig:
    """Returns the default config of the experiment `name`, as `get_experiment` does.

    Raises:
      UsageError: as `get_experiment` does.
      ConfigError: when the factory passes unknown keys or wrong values to a config class.
    """
    try:
        return get_experiment(name)
    except FieldError as error:
        factory = experiments.lookup(name)
        origin = f"{factory.__module__}.{getattr(factory, '__qualname__', name)}"
        raise ConfigError(dataclasses.replace(mistake, origin=origin) for mistake in error.mistakes) from error
