"""Shows an experiment's config: each value and its source, and the meaning of values you name.

On a terminal each value is followed by a sentence about it. In a pipe there is one line for each
value.
"""

from __future__ import annotations

import argparse
import json
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
from trainer_kit.config.json_schema import create_json_schema
from trainer_kit.config.resolve import list_resolved_values
from trainer_kit.errors import ExitCode, UsageError, suggest_names

EXAMPLE = "trainer-kit show digits --diff --params_override=learning_rate=3e-4"

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
    parser.add_argument(
        "--schema",
        action="store_true",
        help="Shows the JSON schema of the experiment's config files, for editors.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints path, value and origin of each value, one per line.

    The explanations that were asked for follow their values.
    """
    resolved = resolve_arguments(arguments)
    if arguments.schema:
        schema = create_json_schema(resolved.config, arguments.experiment)
        print(json.dumps(schema, indent=1))
        return ExitCode.DONE

    experiment = get_experiment(arguments.experiment)
    baseline = experiment if arguments.diff else None
    values = list_resolved_values(resolved, baseline=baseline)
    defaults = flatten_values(experiment)
    if not values:
        print("every value is the experiment's default")

    selected_values = _select_values(values, arguments.paths)
    console = find_console(sys.stdout)
    shows_docs = arguments.paths or console
    docs = read_docs_by_path(resolved.config) if shows_docs else {}
    assignments = [f"{path} = {value!r}" for path, value, _ in selected_values]
    # A longer assignment does not push all origins to the right.
    longest = max(map(len, assignments), default=0)
    width = min(longest, 72)
    for assignment, (path, _, origin) in zip(assignments, selected_values, strict=True):
        print(f"{assignment:<{width}}  # {origin}")
        if path in docs:
            doc = docs[path]
            texts = [doc.first_sentence]
            if arguments.paths:
                default = doc.default
                if path in defaults:
                    default = format_value(defaults[path])
                default_text = default or "not set"
                texts = [
                    doc.text,
                    f"It takes {doc.allowed_values}; the default here is {default_text}.",
                ]
            text_width = 100
            if console:
                text_width = min(console.width, text_width)
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
        prefix = f"{path}."
        if not any(f"{value_path}.".startswith(prefix) for value_path in value_paths):
            sections = {value_path.rpartition(".")[0] for value_path in value_paths}
            section_paths = sorted(sections - {""})
            suggestion = suggest_names(path, [*value_paths, *section_paths])
            raise UsageError(f"{path}: there is no such value; {suggestion}")
    if not paths:
        return list(values)
    prefixes = tuple(f"{path}." for path in paths)
    selected_values = []
    for value in values:
        value_path = value[0]
        if f"{value_path}.".startswith(prefixes):
            selected_values.append(value)
    return selected_values
