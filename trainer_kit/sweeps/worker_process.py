"""A process that runs the trials of a sweep in turn, as the sweep sees it. No TensorFlow."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

_MODULE = "trainer_kit.sweep_worker"


class Evaluated(NamedTuple):
    """A worker's message: an evaluation, after which it waits for the answer whether to end."""

    step: int
    value: float


class Ended(NamedTuple):
    """A worker's message: the trial has ended. `error` is a line, "" without an error."""

    exit_code: int
    error: str


class WorkerProcess:
    """A process that runs trials in turn, started at once.

    It ends with the process of the sweep, whatever ends that.

    Args:
      log_path: The file to which the output of the trials is appended.
      cores: The CPU cores that the process may use.
      settings: What has to be equal for all trials of the process.

    Attributes:
      connection: Where the messages of the process arrive.
      settings: The argument.
      trial_count: The number of trials that were sent to it.
    """

    def __init__(self, log_path: str, cores: Sequence[int], settings: object) -> None:
        self.settings = settings
        self.trial_count = 0
        self._is_busy = False
        self.connection, child_connection = multiprocessing.Pipe()
        descriptor = child_connection.fileno()
        core_list = ",".join(str(core) for core in cores)
        with child_connection, open(log_path, "ab") as log:
            # A session of its own: Ctrl-C reaches the sweep, which then stops the process. The end
            # of its standard input shows the process that the sweep is gone.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(descriptor), core_list],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                start_new_session=True,
            )

    def send_trial(self, flags: Sequence[str], metric: str) -> None:
        """Starts a trial: the flags of `python -m trainer_kit.train`, and the metric to report."""
        self.trial_count += 1
        self._is_busy = True
        # A process that has just died shows that to the next call of `receive`.
        with contextlib.suppress(OSError):
            self.connection.send((list(flags), metric))

    def receive(self) -> Evaluated | Ended | None:
        """Returns the next message, or None if the process has ended without one."""
        try:
            message: Evaluated | Ended = self.connection.recv()
        except (EOFError, OSError):
            return None
        self._is_busy = isinstance(message, Evaluated)
        return message

    def answer(self, ends_trial: bool) -> None:
        """Answers an Evaluated message."""
        with contextlib.suppress(OSError):
            self.connection.send(ends_trial)

    def stop(self) -> int:
        """Stops the process, and returns its exit code. A trial saves its state first."""
        if self._is_busy:
            self._process.terminate()
        self.connection.close()
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code


def divide_cores(jobs: int) -> list[list[int]]:
    """Returns the cores of each of `jobs` processes. With more jobs than cores they share cores."""
    cores = sorted(os.sched_getaffinity(0))
    shares = []
    for job in range(jobs):
        begin = job * len(cores) // jobs
        end = max(begin + 1, (job + 1) * len(cores) // jobs)
        shares.append(cores[begin:end])
    return shares
