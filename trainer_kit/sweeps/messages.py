"""The messages of a process that runs trials to its sweep."""

from __future__ import annotations

from typing import NamedTuple

from trainer_kit.errors import ExitCode

# Why a pruned run ended, in its final.json.
PRUNED = "pruned by the sweep"


class Evaluated(NamedTuple):
    """An evaluation, after which the process waits for whether the trial ends."""

    step: int
    value: float


class Ended(NamedTuple):
    """The end of a trial.

    Attributes:
      exit_code: The exit code of the run. Below 0: minus the signal that has killed its process.
      error: What went wrong, in a line. "" if the run is done.
    """

    exit_code: int
    error: str

    @property
    def was_cut_off(self) -> bool:
        """Whether somebody has stopped or killed the run, so that it can continue."""
        return self.exit_code < 0 or self.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
