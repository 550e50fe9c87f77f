"""Compares two checkpoints or files of weights of any program: names, shapes, dtypes, values."""

from __future__ import annotations

import argparse
import sys

from trainer_kit.cli.checkpoint_list import PATH, open_file
from trainer_kit.cli.view.tables import Table, print_tables
from trainer_kit.errors import ExitCode

EXAMPLE = "trainer-kit checkpoint diff runs/a runs/b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths of the two files."""
    parser.add_argument("first", metavar="FIRST", help=PATH)
    parser.add_argument("second", metavar="SECOND", help="The path to compare it with.")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each variable that differs, and how many are equal.

    The exit code is 0 in either case.

    Raises:
      UsageError: when there is no such file.
      StorageError: when a file is damaged.
    """
    # This imports TensorFlow, which other verbs do not need.
    from trainer_kit.checkpoints.weight_files.compare import compare_weights

    first = open_file(arguments.first)
    second = open_file(arguments.second)
    rows, equal = compare_weights(first, second)
    if rows:
        title = f"{first.path} and {second.path}"
        headers = ["name", "difference", "detail"]
        left_aligned = frozenset(headers)
        table = Table(title, headers, rows, left_aligned=left_aligned)
        print_tables([table], sys.stdout)
    print(f"{equal} variables are equal, {len(rows)} differ")
    return ExitCode.DONE
