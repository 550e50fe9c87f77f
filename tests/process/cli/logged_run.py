"""A run of `trainer-kit doctor` in a process of the fork server, which imports this module and so
nothing for tests.
"""

from __future__ import annotations

import os

from tests.fork_server import train


def train_with_log(log: str, *arguments: str) -> None:
    """Trains, with the output in a file."""
    with open(log, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    train(*arguments)
