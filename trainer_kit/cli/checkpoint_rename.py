"""Writes the variables of a checkpoint or a file of weights as a checkpoint with other names."""

from __future__ import annotations

import argparse
import re

from trainer_kit.cli.checkpoint_list import PATH, add_output, open_file
from trainer_kit.errors import ExitCode, UsageError

EXAMPLE = "trainer-kit checkpoint rename model.ckpt --rename ^bert/ encoder/ --output=renamed/bert"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the paths of the file and of the new checkpoint, and the replacements."""
    parser.add_argument("path", metavar="PATH", help=PATH)
    names = ("PATTERN", "REPLACEMENT")
    text = (
        "Replaces what a regular expression finds in names; it may be repeated, and \\1 is its"
        " first group."
    )
    parser.add_argument(
        "--rename", nargs=2, action="append", required=True, metavar=names, help=text
    )
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the checkpoint, and prints how many names have changed.

    Raises:
      UsageError: when a pattern is broken or matches nothing, two variables get one name, or the
        output exists.
      StorageError: when a file cannot be read or written.
    """
    # These import TensorFlow, which other verbs do not need.
    from trainer_kit.checkpoints.weight_files.write import write_renamed
    from trainer_kit.training.initial_weights.variable_matching import apply_renames

    file = open_file(arguments.path)
    try:
        names = apply_renames(file, arguments.rename, "--rename")
    except (re.error, IndexError) as error:
        raise UsageError(
            f"--rename: {error}; give a regular expression and its replacement"
        ) from error

    write_renamed(file, names, arguments.output)
    renamed_count = 0
    for new_name, old_name in names.items():
        if new_name != old_name:
            renamed_count += 1
    print(f"{arguments.output}: {renamed_count} of {len(names)} variables are renamed")
    return ExitCode.DONE
