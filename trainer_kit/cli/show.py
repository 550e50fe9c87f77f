"""Shows an experiment's config: every value and its source, and the meaning of the values that you name.

On a terminal each value is followed by a sentence about it. In a pipe there is one line for each
value.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
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
Value = tuple[str, Any, str]  # dotted path, plain value, origin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the values to explain, the sources of the config, and --diff."""
    add_config_arguments(parser)
    parser.add_argument("paths", nargs="*", metavar="PATH", help=_PATHS)
    parser.add_argument(
        "--diff",
        action="store_true",
        help="Shows only values that differ from the experiment's defaults.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints path, value and origin of each value, one per line, and the explanations that were asked for."""
    resolved = resolve_arguments(arguments)
    experiment = get_experiment(arguments.experiment)
    values = list_resolved_values(resolved, baseline=experiment if arguments.diff else None)
    defaults = flatten_values(experiment)
    if not values:
        print("every value is the experiment's default")
    chosen = _select_values(values, arguments.paths)
    console = find_console(sys.stdout)
    docs = read_docs_by_path(resolved.config) if arguments.paths or console else {}
    left = max((len(f"{path} = {value!r}") for path, value, _ in chosen), default=0)
    for path, value, origin in chosen:
        print(f"{f'{path} = {value!r}':<{min(left, 72)}}  # {origin}")
        if path in docs:
            doc = docs[path]
            texts = [doc.first_sentence]
            if arguments.paths:
                default = format_value(defaults[path]) if path in defaults else doc.default
                texts = [
                    doc.text,
                    f"It takes {doc.allowed_values}; the default here is {default or 'not set'}.",
                ]
            for line in _wrap_texts(texts, min(console.width if console else 100, 100)):
                console.print(line, style="dim", markup=False) if console else print(line)
    return ExitCode.DONE


def _select_values(values: Sequence[Value], paths: Sequence[str]) -> list[Value]:
    """Returns the values at `paths`, or in the sections at `paths`; without paths, all values.

    Raises:
      UsageError: for a path that is neither a value nor a section.
    """
    known = [path for path, _, _ in values]
    for path in paths:
        if not any(f"{one}.".startswith(f"{path}.") for one in known):
            inside = {one.rpartition(".")[0] for one in known}
            raise UsageError(
                f"{path}: there is no such value;"
                f" {suggest_names(path, [*known, *sorted(inside - {''})])}"
            )
    return [
        one
        for one in values
        if not paths or any(f"{one[0]}.".startswith(f"{path}.") for path in paths)
    ]


def _wrap_texts(texts: Sequence[str], width: int) -> Iterator[str]:
    """Yields texts as indented lines."""
    for text in texts:
        yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
