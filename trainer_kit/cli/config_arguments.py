"""Command-line arguments for an experiment and its config.

They name the same sources as those of python -m trainer_kit.train.
"""

from __future__ import annotations

import argparse
from typing import Any

from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.config.merge import ResolvedConfig
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import run_gin_second_pass

_REPEATED = {
    "config_file": "Reads config values from a YAML or JSON file.",
    "gin_file": "Reads gin bindings from a file.",
    "gin_params": "Sets a gin binding, such as TrainerConfig.train_steps = 500.",
    "params_override": (
        "Sets config values: a.b=c,d=[1,2], YAML text, or the path of a YAML or JSON file."
    ),
}


def add_import_argument(parser: argparse.ArgumentParser, more_help: str = "") -> None:
    """Adds the argument for modules to import, whose names are in `arguments.import_module`."""
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="MODULE",
        help=f"Imports a module or .py file. It may be repeated.{more_help}",
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment's name, its modules and the sources of its config."""
    parser.add_argument(
        "experiment", help="The name of the experiment; `trainer-kit list` shows all names."
    )
    for name, meaning in _REPEATED.items():
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            help=f"{meaning} It may be repeated; later ones win.",
        )
    add_import_argument(parser)


def resolve_arguments(arguments: argparse.Namespace) -> ResolvedConfig[ExperimentConfig]:
    """Returns the config that the arguments describe.

    Raises:
      UsageError: for an unknown experiment, and with every mistake in the sources.
    """
    discovery.import_experiment(arguments.experiment, arguments.import_module)
    return resolve_config(arguments.experiment, build_sources(arguments))


def resolve_task(arguments: argparse.Namespace) -> tuple[ExperimentConfig, Any]:
    """Returns the config that the arguments describe and the class of its task.

    Imports the module of the task.

    Raises:
      UsageError: for an unknown experiment, and with every mistake in the sources.
    """
    config = resolve_arguments(arguments).config
    task_type = lookup_task_class(config.task)
    run_gin_second_pass(arguments.gin_file, arguments.gin_params)
    return config, task_type


def build_sources(arguments: argparse.Namespace) -> ConfigSources:
    """Returns the sources of config values that the arguments name."""
    return ConfigSources(
        config_files=tuple(arguments.config_file),
        gin_files=tuple(arguments.gin_file),
        gin_params=tuple(arguments.gin_params),
        params_overrides=tuple(arguments.params_override),
    )
