"""Shows the runs in a folder, also those that begin later, in TensorBoard on this machine.

Give the folder that holds the folders of jobs, such as tmp/PIPELINE. Only this machine can reach
the server: from elsewhere, forward its port.
"""

from __future__ import annotations

import argparse
import os
import sys

from trainer_kit.cli.runs.list_runs import build_runs_table
from trainer_kit.cli.view.tables import print_tables
from trainer_kit.errors import UsageError

EXAMPLE = "trainer-kit tensorboard runs"

_LAST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the folder and the port."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="A folder that contains runs, at any depth, or the folder of one run.",
    )
    port = "The port of the server. Default: 6006, or the next one that is free; 0: any free one."
    parser.add_argument("--port", type=int, metavar="N", help=port)


def run(arguments: argparse.Namespace) -> int:
    """Lists the runs, and becomes TensorBoard, which shows them until a signal ends it.

    Does not return.

    Raises:
      UsageError: when the folder is missing or remote, or a number is out of range.
    """
    table = build_runs_table(arguments.folder)
    if arguments.port is not None and not 0 <= arguments.port <= _LAST_PORT:
        raise UsageError(
            f"--port: {arguments.port} is not a port; give a number from 0 to {_LAST_PORT}"
        )

    print_tables([table], sys.stdout)
    sys.stdout.flush()
    command = [
        "tensorboard.main",
        "--logdir",
        os.path.expanduser(arguments.folder),
        "--host",
        "127.0.0.1",
    ]
    if arguments.port is not None:
        command += ["--port", str(arguments.port)]
    # What TensorBoard's own imports warn of is not the user's.
    warning_flags = ["-W", "ignore::UserWarning"]
    # TensorBoard takes the place of this process, so that signals reach it.
    command_line = [sys.executable, *warning_flags, "-m", *command]
    os.execv(sys.executable, command_line)
