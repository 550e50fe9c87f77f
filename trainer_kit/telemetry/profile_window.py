"""The steps of a run that are traced for a profile. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer_kit.errors import UsageError


@dataclass(frozen=True)
class ProfileSteps:
    """The steps from `first` to `last`, both included.

    Step 1 is the one that takes global_step from 0 to 1.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_profile_steps(text: str) -> ProfileSteps:
    """Returns the steps that "10:20" names: 10, 20 and those between.

    Raises:
      UsageError: when the text is not a window of steps.
    """
    window = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text, re.ASCII)
    if window is None:
        raise UsageError(
            f"{text!r} is not a window of steps; write the first and the last step, as in 10:20"
        )
    first = int(window[1])
    last = int(window[2])
    if first < 1:
        raise UsageError(f"{text!r} begins at step {first}, but the first step of a run is 1")
    if last < first:
        raise UsageError(
            f"{text!r} ends before it begins; write the first step, then the last one, as in 10:20"
        )
    return ProfileSteps(first, last)
