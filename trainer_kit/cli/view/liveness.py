"""Decides whether a process is alive from its heartbeat file, which a reader reads repeatedly.

The clocks of two machines differ. So a beat is only compared with the last one, and the time without a change is
measured by this process's clock. The file's age counts only at the first reading.
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
    """The state of a process.

    Attributes:
      state: "alive"; "silent", for longer than a living process would be; "gone", it no longer runs on this machine and
        recorded no end; or "ended", as it recorded.
      seconds: The time since its last beat.
    """

    state: State
    seconds: float


@dataclass(frozen=True)
class _Seen:
    beat: str
    at: float
    age: float


class Pulses:
    """Tracks the heartbeats of processes, each by its name.

    Args:
      clock: Returns monotonic seconds.
      wall: Returns seconds since the epoch, for the age of a file at the first reading.
      host: The name of this machine, whose process table can be checked.
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
        """Returns the state of the process called `name`, given its newest heartbeat."""
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
    """Returns "alive", "ended: done", "gone, no end recorded" or "silent for 23 s"."""
    if pulse.state == "silent":
        return f"silent for {math.floor(pulse.seconds)} s"
    return {"ended": f"ended: {process.ended}", "gone": "gone, no end recorded"}.get(pulse.state, pulse.state)
