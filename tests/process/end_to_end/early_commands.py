"""Runs `python -m trainer_kit.train` for each line of standard input, in a fork of a process
without TensorFlow.

A line holds, in JSON, the arguments and a file for what is written to standard error; the exit code
is printed. The command's modules are imported already, so one that ends before TensorFlow is
imported takes a tenth of the time.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence

import trainer_kit.train  # noqa: F401
from tests.fork_server import train


def _run(arguments: Sequence[str], file: str) -> None:
    """In the fork: the command, with a line of `-X importtime` at the end when it has imported
    TensorFlow.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)

    def report_tensorflow() -> None:
        if "tensorflow" in sys.modules:
            print("import time: 0 | 0 | tensorflow", file=sys.stderr)

    atexit.register(report_tensorflow)
    train(*arguments)


def main() -> None:
    """Reads and runs."""
    for line in sys.stdin:
        if not (process := os.fork()):
            _run(*json.loads(line))
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
