"""Races contenders that take turns: each runs in its own process, and only one of them runs at any moment.

All contenders of a round are forked from one process that has imported TensorFlow. They get ready at the same time, and
then run window by window, in a changing order, while the others are stopped. So a slow second of the machine hits
neighbouring windows alike, unlike with processes that run one after the other, and tf.data tunes itself for each
process alone. Waiting contenders are stopped by a signal. Otherwise their threads would take time from the running
contender, and prepare data or finish a save outside of their own measured time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.benchmarks import pacer
from scripts.benchmarks.results import Goal, Row
from tests.fork_server import Child, Ended, ForkServer

PRELOADED = ("scripts.benchmarks.by_hand", "scripts.benchmarks.ours", "scripts.benchmarks.others")
READY_WITHIN, WINDOW_WITHIN, ENDED_WITHIN = 900.0, 300.0, 60.0  # seconds
REASON = 250  # most characters of an error message that are reported


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A program to measure.

    Attributes:
      name, label, to, goals, line, x: See Row.
      run: "module:function", which takes a Pacer, a folder and `options`.
      options: Keyword arguments of the function.
      needs: Modules without which the contender is left out.
      fresh: Whether its process is started from scratch, not forked from one that has imported TensorFlow.
      quick: Whether a quick measurement includes it.
    """

    name: str
    label: str
    run: str
    options: Mapping[str, Any] = field(default_factory=dict)
    to: str = ""
    goals: tuple[Goal, ...] = ()
    needs: tuple[str, ...] = ()
    fresh: bool = False
    quick: bool = False
    line: str = ""
    x: float = 0.0

    @property
    def absent(self) -> str:
        """Why the contender cannot run here; "" if it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{' and '.join(missing)} not installed" if missing else ""

    def row(self) -> Row:
        """Returns a row without figures."""
        place = Row(name=self.name, label=self.label, line=self.line, x=self.x)
        return replace(place, to=self.to, goals=self.goals, absent=self.absent)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The number and length of measurements.

    Attributes:
      rounds: The number of rounds; each starts all processes again.
      most_rounds: The largest number of rounds, if `rounds` do not suffice; 0: there are no further rounds.
      windows: readings of each in a round.
      seconds: of a window, at least; it ends with a loop.
      warm_up: seconds of the window that comes first and does not count; none if 0.
      until: count at which a round is over, too, once all contenders have reached it; 0: none.
      settles_within: seconds after the beginning of a window in which loops that begin do not count.
    """

    rounds: int
    windows: int
    seconds: float
    warm_up: float = 1.0
    until: int = 0
    settles_within: float = pacer.SETTLES_WITHIN
    most_rounds: int = 0


@dataclass
class Outcome:
    """The outcome of a race.

    Attributes:
      windows: (count, seconds) of each window, by contender and round.
      starts: Seconds until the first loop was done, by contender and round.
      failed: The reason why a contender has neither.
    """

    windows: dict[str, list[list[tuple[int, float]]]]
    starts: dict[str, list[float]]
    failed: dict[str, str]

    def rates(self, name: str) -> list[list[float]]:
        """Returns counts per second."""
        return [[count / seconds for count, seconds in windows] for windows in self.windows[name]]

    def costs(self, name: str, scale: float = 1.0) -> list[list[float]]:
        """Returns seconds per count, times `scale`."""
        return [[scale * seconds / count for count, seconds in windows] for windows in self.windows[name]]


class Fresh:
    """A process that was started, not forked, with the methods of a Child that are needed here."""

    def __init__(self, contender: Contender, folder: str, descriptor: int) -> None:
        self._output = Path(f"{folder}.txt")
        arguments = [str(descriptor), contender.run, folder, json.dumps(dict(contender.options))]
        command = [sys.executable, "-m", pacer.__name__, *arguments]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, pass_fds=[descriptor], start_new_session=True
            )

    @property
    def text(self) -> str:
        """The output of the process."""
        return self._output.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> Ended:
        """Waits for the process, and returns its end."""
        return Ended(self._process.wait(timeout), self.text, 0.0)


class Runner:
    """A contender that has been started."""

    def __init__(self, child: Child | Fresh, connection: Connection) -> None:
        self._child, self._connection = child, connection

    def receive(self, within: float) -> Any:
        """Returns the contender's next message, and stops the contender.

        Raises:
          RuntimeError: when the contender has ended or sends nothing in time; with its error message.
        """
        try:
            if self._connection.poll(within):
                message = self._connection.recv()
                self._child.kill(signal.SIGSTOP)
                return message
            reason = f"no answer within {within:g} s"
        except (EOFError, OSError):
            reason = f"ended with {self._child.wait(ENDED_WITHIN).code}"
        raise RuntimeError(f"{reason}: {last_words(self._child.text)}")

    def window(self, seconds: float, settles_within: float) -> tuple[int, float]:
        """Lets the contender run for one window; returns (count, seconds)."""
        self._child.kill(signal.SIGCONT)
        with contextlib.suppress(OSError):  # it has ended, and `receive` raises the reason
            self._connection.send((seconds, settles_within))
        count, taken = self.receive(seconds + WINDOW_WITHIN)
        return count, taken

    def end(self) -> None:
        """Kills the contender."""
        self._child.kill()
        self._child.wait(ENDED_WITHIN)
        self._connection.close()


def last_words(text: str) -> str:
    """Returns the error that ended a process, from its output, as one short line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(lines[begins[-1] if begins else -1 :])[:REASON]


@contextlib.contextmanager
def server() -> Iterator[ForkServer]:
    """Starts the process from which the contenders are forked."""
    with ForkServer(preload=PRELOADED) as running:
        yield running


def race(
    running: ForkServer,
    contenders: Sequence[Contender],
    plan: Plan,
    title: str,
    suffices: Callable[[Outcome], bool] = lambda outcome: True,
) -> Outcome:
    """Runs all rounds; one that fails is out, and the others go on.

    Args:
      running: of `server`.
      contenders: with names of their own.
      plan: how often and how long.
      title: for the line that tells, on standard error, how far it is.
      suffices: whether there are enough rounds, once there are `plan.rounds`.
    """
    names = [contender.name for contender in contenders]
    outcome = Outcome({name: [] for name in names}, {name: [] for name in names}, {})
    for number in range(max(plan.rounds, plan.most_rounds)):
        if number >= plan.rounds and suffices(outcome):
            break
        print(f"{title}: round {number + 1} of {plan.rounds}", file=sys.stderr, flush=True)
        left = [one for one in contenders if one.name not in outcome.failed and not one.absent]
        _round(running, left, plan, outcome, random.Random(number))
    for name in outcome.failed:
        outcome.windows[name], outcome.starts[name] = [], []
    return outcome


def _round(
    running: ForkServer, contenders: Sequence[Contender], plan: Plan, outcome: Outcome, order: random.Random
) -> None:
    folder = tempfile.mkdtemp(prefix="trainer_kit_bench_")
    runners = {one.name: _start(running, one, f"{folder}/{one.name}") for one in contenders}
    taken: dict[str, list[tuple[int, float]]] = {name: [] for name in runners}
    try:
        for name in list(runners):
            with _or_out(name, outcome, runners):
                outcome.starts[name].append(float(runners[name].receive(READY_WITHIN)))
        if plan.warm_up > 0:
            _windows(runners, replace(plan, seconds=plan.warm_up), outcome, order)
        for _ in range(plan.windows):
            for name, window in _windows(runners, plan, outcome, order).items():
                taken[name].append(window)
            if plan.until and all(sum(count for count, _ in taken[name]) >= plan.until for name in runners):
                break
        for name in runners:
            outcome.windows[name].append(taken[name])
    finally:
        for runner in runners.values():
            runner.end()
        shutil.rmtree(folder, ignore_errors=True)


def _windows(
    runners: dict[str, Runner], plan: Plan, outcome: Outcome, order: random.Random
) -> dict[str, tuple[int, float]]:
    """Gives each contender one window, in random order."""
    taken = {}
    for name in order.sample(list(runners), len(runners)):
        with _or_out(name, outcome, runners):
            taken[name] = runners[name].window(plan.seconds, plan.settles_within)
    return taken


def _start(running: ForkServer, contender: Contender, folder: str) -> Runner:
    own, theirs = multiprocessing.Pipe()
    with theirs:  # closed here, so that the end of the process is the end of the connection
        if contender.fresh:
            return Runner(Fresh(contender, folder, theirs.fileno()), own)
        return Runner(running.start(pacer.run, theirs, contender.run, folder, dict(contender.options)), own)


@contextlib.contextmanager
def _or_out(name: str, outcome: Outcome, runners: dict[str, Runner]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        outcome.failed[name] = str(error)
        runners.pop(name).end()
