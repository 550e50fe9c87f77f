"""Shows the runs in a folder, also those that begin later, in TensorBoard on this machine.

Give the folder that holds the folders of jobs, such as tmp/PIPELINE. Only this machine can reach
the server: from elsewhere, forward its port.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trainer_kit import files
from trainer_kit.cli.view.run_status import (
    TrainerHeartbeat,
    explain_read_errors,
    is_run_folder,
    read_trainer_heartbeat,
)
from trainer_kit.cli.view.tables import Table, print_tables
from trainer_kit.errors import UsageError
from trainer_kit.process.run_lock import is_process_alive

_LAST_PORT = 65535

# The time of four beats.
_SILENT_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the folder and the port."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="A folder with runs in it, at any depth, or of one run."
    )
    port = "The port of the server. Default: 6006, or the next one that is free; 0: any free one."
    parser.add_argument("--port", type=int, metavar="N", help=port)


def run(arguments: argparse.Namespace) -> int:
    """Lists the runs, and becomes TensorBoard, which shows them until a signal ends it.

    Does not return.

    Raises:
      UsageError: when the folder is missing or remote, a number is out of range, or TensorBoard is
        not installed.
      StorageError: when a folder cannot be read.
    """
    folder = Path(arguments.folder)
    if files.is_remote(arguments.folder):
        raise UsageError(
            f"FOLDER: {arguments.folder!r} is a remote folder; give the path that it is mounted at"
        )
    if not folder.is_dir():
        raise UsageError(
            f"FOLDER: there is no folder {folder}; give the folder that holds the folders of runs"
        )
    if arguments.port is not None and not 0 <= arguments.port <= _LAST_PORT:
        raise UsageError(
            f"--port: {arguments.port} is not a port; give a number from 0 to {_LAST_PORT}"
        )
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("TensorBoard is not installed; run `pip install tensorboard`")

    print_tables([_table(folder)], sys.stdout)
    sys.stdout.flush()
    command = ["tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    if arguments.port is not None:
        command += ["--port", str(arguments.port)]
    # What TensorBoard's own imports warn of is not the user's.
    warning_flags = ["-W", "ignore::UserWarning"]
    # TensorBoard takes the place of this process, so that signals reach it.
    os.execv(sys.executable, [sys.executable, *warning_flags, "-m", *command])


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the folders of the runs in `folder`, in the order of their names.

    `folder` may be the folder of a run itself.

    Raises:
      StorageError: when `folder` cannot be read.
    """
    with explain_read_errors(folder):
        os.listdir(folder)
    for name, folders, _ in os.walk(folder):
        folders.sort()
        if is_run_folder(Path(name)):
            # What is in a run belongs to it.
            folders.clear()
            yield Path(name)


def _table(folder: Path) -> Table:
    rows: list[list[str]] = []
    for path in find_runs(folder):
        heartbeat = read_trainer_heartbeat(path)
        state = "no heartbeat"
        step = ""
        if heartbeat is not None:
            state = _describe_state(heartbeat)
            step = "" if heartbeat.step is None else str(heartbeat.step)
        run_name = os.path.relpath(path, folder)
        rows.append([run_name, state, step])
    if not rows:
        return Table(f"{folder} holds no run yet", (), ())
    return Table(
        f"runs in {folder}",
        ("run", "state", "step"),
        rows,
        left_aligned=frozenset({"run", "state"}),
    )


def _describe_state(trainer: TrainerHeartbeat) -> str:
    """Returns "alive", "ended: done", "gone, no end recorded" or "silent for 23 s"."""
    if trainer.end_state:
        return f"ended: {trainer.end_state}"

    # The process table of another machine cannot be read.
    if (
        trainer.host == socket.gethostname()
        and trainer.pid is not None
        and not is_process_alive(trainer.pid)
    ):
        return "gone, no end recorded"

    seconds = time.time() - trainer.write_time
    return "alive" if seconds < _SILENT_SECONDS else f"silent for {seconds:.0f} s"
