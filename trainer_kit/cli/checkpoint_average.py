"""Averages checkpoints or files of weights with the same variables into a new one."""

from __future__ import annotations

import argparse
import os

from trainer_kit.checkpoint_names import parse_checkpoint_name
from trainer_kit.cli.checkpoint_list import PATH, add_output, open_file
from trainer_kit.errors import ExitCode, UsageError

EXAMPLE = (
    "trainer-kit checkpoint average runs/digits/ckpt-800 runs/digits/ckpt-900 --output=average"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths of the files, and that of the new one."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help=f"{PATH} Give two or more of one kind."
    )
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes a copy of the last file whose values of floating point are the means of all files.

    Raises:
      UsageError: when the files differ in their variables, or the output exists or would be taken
        for a checkpoint of a run.
      StorageError: when a file cannot be read or written.
    """
    # This imports TensorFlow, which other verbs do not need.
    from trainer_kit.checkpoints.weight_files.write import write_average

    # Best weights are in a folder of the run.
    folder, name = os.path.split(arguments.output)
    parents = (folder, os.path.dirname(folder))
    manifest_paths = [os.path.join(parent, "manifest.json") for parent in parents]
    is_in_run = any(map(os.path.exists, manifest_paths))
    if is_in_run and parse_checkpoint_name(f"{name}.index"):
        raise UsageError(
            f"--output: {arguments.output} would be taken for a checkpoint of the run; give another"
            " name"
        )

    files = [open_file(path) for path in arguments.paths]
    count = write_average(files, arguments.output)
    print(f"{arguments.output}: the means of {count} variables of {len(files)} files")
    return ExitCode.DONE
