"""Converts a config to YAML and back, with an exact round trip."""

from __future__ import annotations

import os

from trainer_kit import files
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError, Mistake

# Values of earlier releases that were removed.
_REMOVED_VALUES = ("accumulate_steps=auto", "fuse_steps=auto", "executor=auto")


def to_yaml(config: ExperimentConfig) -> str:
    """Returns every value of `config` as YAML, and of a "oneof" its type and the chosen branch."""
    return yaml_loader.dump(config.as_dict())


def parse_params(text: str) -> yaml_loader.ParsedYaml:
    """Returns the values in the text of a params.yaml, with their lines.

    Raises:
      ConfigError: When the text is not YAML, or contains no config.
    """
    parsed = yaml_loader.parse(text, "params.yaml", is_trusted=True)
    if not isinstance(parsed.values, dict):
        advice = "it needs the sections of an experiment; restore it, or start in another model_dir"
        raise ConfigError([Mistake("", "holds no config", advice, "params.yaml")])
    return parsed


def from_yaml(text: str, default_config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config that the text of a params.yaml describes.

    `auto`, a value of earlier releases for how a training loop runs, counts as left out.

    Args:
      text: The text of a params.yaml.
      default_config: The default config of the experiment. It gives the classes, and all values
        that the text leaves out.

    Raises:
      ConfigError: When the text is not YAML or does not fit the classes. It contains all mistakes,
        with their lines.
    """
    parsed = parse_params(text)

    # Values of earlier releases that were removed count as left out.
    for section in ("trainer", "runtime"):
        fields = parsed.values.get(section)
        if isinstance(fields, dict):
            parsed.values[section] = {
                name: value
                for name, value in fields.items()
                if f"{name}={value}" not in _REMOVED_VALUES
            }

    origins = {path: f"params.yaml:{line}" for path, line in parsed.lines.items()}
    layer = ConfigLayer(parsed.values, origins, replaces_named_sections=True)
    return apply_layers(default_config, [layer]).config


def write_params(path: str | os.PathLike[str], config: ExperimentConfig) -> None:
    """Writes `config` atomically to the YAML file at `path`, which is local.

    Raises:
      StorageError: When it cannot be written.
    """
    files.write_text(path, to_yaml(config), "params")
