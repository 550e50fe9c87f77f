"""Shows an experiment's config: every value and where it comes from."""

from __future__ import annotations

import argparse

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.config.experiments import get_experiment
from trainer_kit.config.resolve import describe
from trainer_kit.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the experiment, the sources of its config, and --diff."""
    add_config_arguments(parser)
    parser.add_argument("--diff", action="store_true", help="only values that differ from the experiment's defaults")


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per value: path, value, origin."""
    resolved = resolve_arguments(arguments)
    lines = describe(resolved, against=get_experiment(arguments.experiment) if arguments.diff else None)
    if not lines:
        print("every value is the experiment's default")
    left = max((len(f"{path} = {value!r}") for path, value, _ in lines), default=0)
    for path, value, origin in lines:
        print(f"{f'{path} = {value!r}':<{min(left, 72)}}  # {origin}")
    return ExitCode.DONE
