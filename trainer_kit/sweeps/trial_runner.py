"""Runs the trials of a sweep in turn, in a process that is replaced from time to time.

Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optuna.trial import Trial

# Why a pruned run ended, in its final.json.
PRUNED = "pruned by the sweep"

# Each run leaves some MB in its process.
_TRIALS_PER_PROCESS = 20


class Evaluated(NamedTuple):
    """The message that the trial was evaluated.

    The process then waits for a message that says whether the trial ends.

    Attributes:
      step: The step.
      value: The metric that decides.
    """

    step: int
    value: float


class Ended(NamedTuple):
    """The message that the trial has ended.

    Attributes:
      exit_code: The exit code of the run. Below 0: minus the signal that has killed its process.
      error: What went wrong, in a line. "" if the run is done.
    """

    exit_code: int
    error: str


class TrialRunner:
    """Runs one trial at a time. Its process ends with this one, whatever ends that.

    Args:
      log_path: The file to which the output of the trials is appended.
      cores: The CPU cores that the trials may use.

    Attributes:
      trial: The trial that runs. None if none does.
      connection: Where the messages of the process arrive.
    """

    def __init__(self, log_path: str, cores: Sequence[int]) -> None:
        self._log_path = log_path
        self._cores = cores
        self._trials_left = 0
        self.trial: Trial | None = None
        self._start_process()

    def start(self, trial: Trial, flags: Sequence[str], shares_process: bool) -> None:
        """Starts a trial.

        Args:
          trial: The trial.
          flags: The flags of its run, those of `python -m trainer_kit.train`.
          shares_process: Whether it may run in the process of other trials.
        """
        is_unused = self._trials_left == _TRIALS_PER_PROCESS
        if self._trials_left == 0 or not (shares_process or is_unused):
            self.stop()
            self._start_process()
        self._trials_left = self._trials_left - 1 if shares_process else 0
        self.trial = trial
        self.send(flags)

    def send(self, message: object) -> None:
        """Sends flags, or the answer to an evaluation: whether the trial ends."""
        # The next call of `receive` shows that the process has ended.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Evaluated | Ended:
        """Waits for the next message of the trial. The end of its process counts as one."""
        try:
            message: Evaluated | Ended = self.connection.recv()
        except (EOFError, OSError):
            exit_code = self._process.wait()
            error = f"its process ended with exit code {exit_code}; see {self._log_path}"
            message = Ended(exit_code, error)
            self._trials_left = 0
        if isinstance(message, Ended):
            self.trial = None
        return message

    def terminate(self) -> None:
        """Asks the process to end. A trial that still runs saves its state first."""
        self._process.terminate()

    def stop(self) -> None:
        """Waits until the trial and the process have ended."""
        while self.trial is not None:
            if isinstance(self.receive(), Evaluated):
                self.send(False)
        self.connection.close()
        self._process.wait()

    def _start_process(self) -> None:
        self._trials_left = _TRIALS_PER_PROCESS
        self.connection, worker_connection = multiprocessing.Pipe()
        descriptor = worker_connection.fileno()
        command = [sys.executable, "-m", "trainer_kit.sweep_worker", str(descriptor)]
        with worker_connection, open(self._log_path, "ab") as log:
            # In a session of its own it gets no Ctrl-C: the sweep stops it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, pass_fds=[descriptor], start_new_session=True
            )
        # TensorFlow counts these when it is imported.
        if self._cores:
            os.sched_setaffinity(self._process.pid, self._cores)
