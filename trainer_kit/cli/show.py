"""Shows an experiment's config: each value and its source, and the meaning of values you name.

On a terminal each value is followed by a sentence about it. In a pipe there is one line for each
value.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.cli.view.tables import find_console
from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.config.field_docs import read_docs_by_path
from trainer_kit.config.fields import flatten_values
from trainer_kit.config.resolve import list_resolved_values
from trainer_kit.errors import ExitCode, UsageError, suggest_names

_PATHS = "Values or sections to explain, such as trainer.train_steps."

# (dotted path, plain value, origin).
Value = tuple[str, Any, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the values to explain, the config's sources and --diff."""
    add_config_arguments(parser)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=_PATHS)
    parser.add_argument(
        "--diff",
        action="store_true",
        help="Shows only values that differ from the experiment's defaults.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints path, value and origin of each value, one per line.

    The explanations that were asked for follow their values.
    """
    resolved = resolve_arguments(arguments)
    experiment = get_experiment(arguments.experiment)
    values = list_resolved_values(resolved, baseline=experiment if arguments.diff else None)
    defaults = flatten_values(experiment)
    if not values:
        print("every value is the experiment's default")

    selected_values = _select_values(values, arguments.paths)
    console = find_console(sys.stdout)
    docs = read_docs_by_path(resolved.config) if arguments.paths or console else {}
    assignments = [f"{path} = {value!r}" for path, value, _ in selected_values]
    # A longer assignment does not push all origins to the right.
    width = min(max(map(len, assignments), default=0), 72)
    for assignment, (path, _, origin) in zip(assignments, selected_values, strict=True):
        print(f"{assignment:<{width}}  # {origin}")
        if path in docs:
            doc = docs[path]
            texts = [doc.first_sentence]
            if arguments.paths:
                default = format_value(defaults[path]) if path in defaults else doc.default
                texts = [
                    doc.text,
                    f"It takes {doc.allowed_values}; the default here is {default or 'not set'}.",
                ]
            text_width = min(console.width, 100) if console else 100
            lines: list[str] = []
            for text in texts:
                lines += textwrap.wrap(
                    text, text_width, initial_indent="    ", subsequent_indent="    "
                )
            for line in lines:
                if console:
                    console.print(line, style="dim", markup=False)
                else:
                    print(line)
    return ExitCode.DONE


def _select_values(values: Sequence[Value], paths: Sequence[str]) -> list[Value]:
    """Returns the values at `paths`, or in the sections at `paths`. Without paths, all values.

    Raises:
      UsageError: for a path that is neither a value nor a section.
    """
    value_paths = [value_path for value_path, _, _ in values]
    for path in paths:
        if not any(f"{value_path}.".startswith(f"{path}.") for value_path in value_paths):
            sections = {value_path.rpartition(".")[0] for value_path in value_paths} - {""}
            suggestion = suggest_names(path, [*value_paths, *sorted(sections)])
            raise UsageError(f"{path}: there is no such value; {suggestion}")
    if not paths:
        return list(values)
    return [
        value for value in values if any(f"{value[0]}.".startswith(f"{path}.") for path in paths)
    ]
