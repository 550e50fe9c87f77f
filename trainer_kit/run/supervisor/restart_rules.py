"""The exit codes as a supervisor sees them: the cause of a command's end, and whether to run it again."""

from __future__ import annotations

import enum
import signal

from trainer_kit.errors import ExitCode


class Decision(enum.Enum):
    """What follows an exit code."""

    END = "end"
    RESTART = "restart, not counted"
    RETRY = "restart, counted"


def outcome(code: int) -> tuple[str, Decision]:
    """Returns the cause and the decision for an exit code; a negative code is minus the number of a signal."""
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})", Decision.RETRY
    if code not in set(ExitCode):
        return f"crashed with exit code {code}", Decision.RETRY
    cause = ExitCode(code).name.lower().replace("_", " ")
    if code == ExitCode.PREEMPTED:
        return cause, Decision.RESTART
    return cause, Decision.RETRY if code in (ExitCode.BUG, ExitCode.STALLED) else Decision.END
