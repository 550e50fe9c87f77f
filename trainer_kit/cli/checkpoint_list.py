"""Lists the variables of a checkpoint or a file of weights of any program."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from trainer_kit.cli.view.tables import Table, print_tables
from trainer_kit.errors import ExitCode

EXAMPLE = "trainer-kit checkpoint list runs/digits"

PATH = (
    "A checkpoint, a folder of checkpoints, the folder of a run, a SavedModel, or a .keras,"
    " .weights.h5 or .h5 file. Of a folder of best weights the best checkpoint is taken, else the"
    " newest."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the path of the file."""
    parser.add_argument("path", metavar="PATH", help=PATH)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each variable, and their number.

    Raises:
      UsageError: when there is no such file.
      StorageError: when it is damaged.
    """
    file = open_file(arguments.path)
    rows = []
    for name, shape in file.shapes.items():
        shape_text = str(list(shape))
        rows.append([name, shape_text, file.dtypes[name]])
    headers = ["name", "shape", "dtype"]
    left_aligned = frozenset(["name", "dtype"])
    table = Table(f"{file.path}, {file.kind}", headers, rows, left_aligned=left_aligned)
    print_tables([table], sys.stdout)

    value_counts = map(math.prod, file.shapes.values())
    value_count = sum(value_counts)
    print(f"{len(rows)} variables with {value_count:,} values")
    return ExitCode.DONE


def open_file(path: str) -> Any:
    """Opens a file of weights, the one that is meant in a folder.

    Imports TensorFlow. Raises what `run` raises.
    """
    # These import TensorFlow, which other verbs do not need.
    from trainer_kit.checkpoints.weight_files.open_file import open_weights
    from trainer_kit.evals.checkpoint_selection import resolve_weights_path

    return open_weights(resolve_weights_path(path))


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the path of a new file."""
    text = (
        "The path of the new checkpoint, such as runs/average, or of the new file of Keras. It must"
        " not exist."
    )
    parser.add_argument("--output", required=True, type=os.path.normpath, metavar="PATH", help=text)
