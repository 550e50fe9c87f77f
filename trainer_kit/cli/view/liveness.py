"""Whether a process that tells of itself in a file is alive, as somebody sees it who reads the file again and again.

The clocks of two machines differ. So a beat is looked at for change only, and how long it has not changed is measured
by the clock of this process; the age of the file counts only for what was so before the first look.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer_kit.cli.view.run_status import Process
from trainer_kit.process.run_lock import runs

State = Literal["alive", "silent", "gone", "ended"]
SILENT_AFTER = 20.0  # seconds: four beats


@dataclass(frozen=True)
class Pulse:
    """How a process is.

    Attributes:
      state: alive; silent, for longer than a living process would be; gone, it is none of this machine's any more and
        has told no end; ended, as it has told.
      seconds: since its last beat.
    """

    state: State
    seconds: float


@dataclass(frozen=True)
class _Seen:
    beat: str
    at: float
    age: float


class Pulses:
    """Feels the pulse of processes, each by its name.

    Args:
      clock: seconds that only go up.
      wall: seconds since the epoch, for the age of a file at the first look.
      host: name of this machine, whose processes can be asked for.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        host: str | None = None,
    ) -> None:
        self._clock, self._wall = clock, wall
        self._host = host or socket.gethostname()
        self._seen: dict[str, _Seen] = {}

    def feel(self, name: str, process: Process) -> Pulse:
        """Returns how the process is that tells of itself under `name`."""
        now, seen = self._clock(), self._seen.get(name)
        if seen is None:
            seen = _Seen(process.beat, now, max(0.0, self._wall() - process.written))
        elif seen.beat != process.beat:
            seen = _Seen(process.beat, now, 0.0)
        self._seen[name] = seen
        seconds = seen.age + now - seen.at
        if process.ended:
            return Pulse("ended", seconds)
        if process.host == self._host and process.pid is not None and not runs(process.pid):
            return Pulse("gone", seconds)
        return Pulse("alive" if seconds < SILENT_AFTER else "silent", seconds)


def pulse_text(process: Process, pulse: Pulse) -> str:
    """Returns "alive", "ended: done", "gone, no end told" or "silent for 23 s"."""
    if pulse.state == "silent":
        return f"silent for {math.floor(pulse.seconds)} s"
    return {"ended": f"ended: {process.ended}", "gone": "gone, no end told"}.get(pulse.state, pulse.state)
