"""Lists experiments: those in ./experiments, in modules named by --import_module, and in entry points.

With --all it also lists the experiments of other frameworks.
"""

from __future__ import annotations

import argparse
import inspect
import sys

from trainer_kit.config import discovery
from trainer_kit.config.experiments import experiments
from trainer_kit.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --all."""
    parser.add_argument(
        "--all", action="store_true", help="Also lists the experiments of other frameworks, such as tfm/mock."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per experiment: its name and the first line of its factory's docstring.

    A package that cannot be imported is reported on standard error; the others are listed, and the exit code is 0.
    """
    names, broken = discovery.find_all_experiments(arguments.import_module)
    if arguments.all:
        discovery.ask_doors()
        names = experiments.names()
    for error in broken:
        print(f"not listed: {str(error).removeprefix('--experiment: ')}", file=sys.stderr)
    if not names and not broken:
        print("no experiments here; go to a folder that has experiments/, or name a module with --import_module")
    width = max(map(len, names), default=0)
    for name in names:
        text = inspect.getdoc(experiments.lookup(name)) or ""
        print(f"{name:<{width}}  {text.splitlines()[0] if text else ''}".rstrip())
    return ExitCode.DONE
