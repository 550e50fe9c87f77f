"""Measures contenders that take turns: each has its own process, and only one of them runs.

All processes of a round are forked from one that has imported TensorFlow. They get ready at the
same time. Then they run window by window in a changing order, while the others are stopped by a
signal. So a slow second of the machine hits neighbouring windows alike, tf.data tunes itself for
each process alone, and the threads of a waiting contender neither take time from the running one
nor prepare data outside of their own windows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from scripts.benchmarks import pacer
from scripts.benchmarks.results import COST_UNITS, Contender, Measurement, Section
from tests.fork_server import ForkServer

PRELOADED = (
    "scripts.benchmarks.by_hand",
    "scripts.benchmarks.ours",
    "scripts.benchmarks.others",
)
# Seconds.
WARM_UP = 1.0
READY_WITHIN = 900.0
WINDOW_WITHIN = 300.0
ENDED_WITHIN = 60.0
REASON_LENGTH = 250


class Runner:
    """The process of a contender.

    Args:
      server: The process that it is forked from.
      contender: The contender.
      folder: A folder for its files.
    """

    def __init__(self, server: ForkServer, contender: Contender, folder: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # Closed here, so that the end of the process is the end of the connection.
        with theirs:
            arguments = (contender.run, folder, contender.options, contender.skip)
            self._child = server.start(pacer.run, theirs, *arguments)

    def receive(self, within: float) -> Any:
        """Returns the contender's next message, and stops the contender.

        Raises:
          RuntimeError: when the contender has ended or sends nothing in time.
        """
        try:
            if self._connection.poll(within):
                message = self._connection.recv()
                self._child.kill(signal.SIGSTOP)
                return message
            reason = f"no answer within {within:g} s"
        except (EOFError, OSError):
            reason = f"ended with {self._child.wait(ENDED_WITHIN).code}"
        raise RuntimeError(f"{reason}: {last_error(self._child.text)}")

    def run_window(self, seconds: float) -> tuple[int, float]:
        """Lets the contender run for one window; returns (count, seconds)."""
        self._child.kill(signal.SIGCONT)
        # If the contender has ended, `receive` raises the reason.
        with contextlib.suppress(OSError):
            self._connection.send(seconds)
        count, duration = self.receive(seconds + WINDOW_WITHIN)
        return count, duration

    def end(self) -> None:
        """Kills the contender."""
        self._child.kill()
        self._child.wait(ENDED_WITHIN)
        self._connection.close()


def last_error(text: str) -> str:
    """Returns the error that ended a process, from its output, as one short line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    pattern = r"[\w.]*(Error|Exception)\b"
    starts = [number for number, line in enumerate(lines) if re.match(pattern, line)]
    return " ".join(lines[starts[-1] if starts else -1 :])[:REASON_LENGTH]


def race(server: ForkServer, section: Section) -> Measurement:
    """Runs all rounds of a section. A contender that fails is left out from then on."""
    measurement = Measurement(section)
    for number in range(max(section.rounds, section.most_rounds)):
        if number >= section.rounds and measurement.is_resolved:
            break
        print(f"{section.name}: round {number + 1}", file=sys.stderr, flush=True)
        _run_round(server, measurement, random.Random(number))
    return measurement


def _run_round(server: ForkServer, measurement: Measurement, order: random.Random) -> None:
    section = measurement.section
    scale = COST_UNITS.get(section.unit)
    runners: dict[str, Runner] = {}
    folder = tempfile.mkdtemp(prefix="trainer_kit_bench_")
    try:
        for contender in section.contenders:
            name = contender.name
            if name not in measurement.failed:
                runners[name] = Runner(server, contender, f"{folder}/{name}")

        for name in list(runners):
            with _drop_failed(name, runners, measurement):
                runners[name].receive(READY_WITHIN)

        if section.seconds:
            _run_windows(runners, WARM_UP, measurement, order)

        readings: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(section.windows):
            windows = _run_windows(runners, section.seconds, measurement, order)
            for name, (count, seconds) in windows.items():
                readings[name].append(scale * seconds / count if scale else count / seconds)

        for name in runners:
            measurement.values.setdefault(name, []).append(readings[name])
    finally:
        for runner in runners.values():
            runner.end()
        shutil.rmtree(folder, ignore_errors=True)


def _run_windows(
    runners: dict[str, Runner], seconds: float, measurement: Measurement, order: random.Random
) -> dict[str, tuple[int, float]]:
    """Gives each contender one window, in random order."""
    windows = {}
    for name in order.sample(list(runners), len(runners)):
        with _drop_failed(name, runners, measurement):
            windows[name] = runners[name].run_window(seconds)
    return windows


@contextlib.contextmanager
def _drop_failed(name: str, runners: dict[str, Runner], measurement: Measurement) -> Iterator[None]:
    """Removes the contender from the measurement if the block raises a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        measurement.failed[name] = str(error)
        measurement.values.pop(name, None)
        runners.pop(name).end()
