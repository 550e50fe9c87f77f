"""Averages checkpoints or files of weights with the same variables, and writes the result as a new one."""

from __future__ import annotations

import argparse
import os

from trainer_kit.checkpoint_names import owner
from trainer_kit.cli.checkpoint_list import PATH
from trainer_kit.errors import ExitCode, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths of the files, and that of the new one."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"{PATH} Give two or more of one kind.")
    parser.add_argument(
        "--output",
        required=True,
        type=os.path.normpath,
        metavar="PATH",
        help="The path of the new checkpoint, such as runs/average, or of the new file of Keras. It must not exist.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes a copy of the last file whose values of floating point are the means of all files.

    Raises:
      UsageError: when the files differ in their variables, or the output exists.
      StorageError: when a file cannot be read or written.
    """
    from trainer_kit.checkpoints.weight_files.average import write_average  # imports TensorFlow
    from trainer_kit.checkpoints.weight_files.open_file import open_weights
    from trainer_kit.evals.checkpoint_selection import weights_at

    if len(arguments.paths) < 2:
        raise UsageError(f"an average needs two or more files, and there are {len(arguments.paths)}; give their paths")
    folder, name = os.path.split(arguments.output)
    if owner(f"{name}.index") and any(os.path.exists(os.path.join(folder, up, "manifest.json")) for up in ("", "..")):
        raise UsageError(f"--output: {arguments.output} would be taken for a checkpoint of the run; give another name")
    files = [open_weights(weights_at(path)) for path in arguments.paths]
    count = write_average(files, arguments.output)
    print(f"{arguments.output}: the means of {count} variables of {len(files)} files")
    return ExitCode.DONE
