"""One supervised process and all that it starts: its signals, its output, and its end as a whole.

It runs in a process group of its own. What is left of the group is ended when the first process has ended, when it was
asked to stop and does not, and when this process itself is killed. POSIX only.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO

from trainer_kit.errors import UsageError
from trainer_kit.process.signals import deciding
from trainer_kit.process.startup_signals import stop_signals

LINES_KEPT = 20  # of the output
_LINE_BYTES = 2000  # of a line that is kept, its end
_WATCH_SECONDS = 1.0
_LEFTOVER_SECONDS = 2.0  # for what is left of the group, between SIGTERM and SIGKILL; and for the last output
_LOG = logging.getLogger(__name__)

# Runs beside the process, in a session of its own; $1 is the grace in seconds. It is told the process group, and then
# killed when the group is gone: a second read that ends means that the supervisor has died.
_GUARD = """
read -r group || exit
read -r line && exit
kill -s TERM -- "-$group"
seconds=0
while [ "$seconds" -lt "$1" ] && kill -s 0 -- "-$group"; do sleep 1; seconds=$((seconds + 1)); done
kill -s KILL -- "-$group"
"""


class Wakeups:
    """While entered, SIGTERM, SIGHUP, SIGINT and SIGCHLD do nothing but end `wait`; in the main thread only.

    No handler runs anything, so no signal can come at a wrong moment. SIGHUP stays ignored where it was, as below
    nohup.

    Attributes:
      stop: of the stop signals that `wait` has seen the one that decides the exit code; see `signals.deciding`.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None

    def __enter__(self) -> Wakeups:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._old_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._stop_signals = stop_signals()
        numbers = (*self._stop_signals, signal.SIGCHLD)
        self._handlers = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._old_writer)
        self._selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float | None) -> list[signal.Signals]:
        """Returns the stop signals that arrive within `seconds` (None: ever); none as soon as a process has ended."""
        numbers = os.read(self._reader, 4096) if self._selector.select(seconds) else b""
        arrived = [signal.Signals(number) for number in numbers if number in self._stop_signals]
        for number in arrived:
            self.stop = deciding(self.stop, number)
        return arrived

    def pause(self, seconds: float) -> None:
        """Returns after `seconds`, or as soon as a stop signal has arrived."""
        give_up = time.monotonic() + seconds
        self.wait(0)
        while self.stop is None and (left := give_up - time.monotonic()) > 0:
            self.wait(left)


def run(
    command: Sequence[str], wakeups: Wakeups, grace_seconds: float, watch: Callable[[], object] = lambda: None
) -> tuple[int, list[str]]:
    """Runs a command to its end, and ends what it leaves behind in its process group.

    Stop signals are passed on to the group; `grace_seconds` after the first of them it is killed. What is written to
    its standard output and error goes to ours, descriptors 1 and 2, as it comes. Its standard input is empty.

    Args:
      command: program and arguments.
      wakeups: entered.
      grace_seconds: from a passed-on signal to SIGKILL.
      watch: called about once a second while the command runs.

    Returns:
      (exit code, or minus the number of the signal that ended it; its last LINES_KEPT lines).

    Raises:
      UsageError: when the command cannot be started.
    """
    output = _Output()
    with _guard(grace_seconds) as entrust:
        process = _start(command)
        try:
            entrust(process.pid)
            assert process.stdout is not None and process.stderr is not None
            output.follow(process.stdout, 1)
            output.follow(process.stderr, 2)
            code = _wait(process, wakeups, grace_seconds, watch)
        finally:
            _end_group(process.pid, min(grace_seconds, _LEFTOVER_SECONDS))
    return code, output.last_lines()


class _Output:
    """Passes on what a process writes, as it comes, and keeps the last lines.

    In threads: when nobody reads what the supervisor writes, signals are passed on all the same.
    """

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=LINES_KEPT)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, source: IO[bytes], target: int) -> None:
        """Copies `source` to the descriptor `target` until it ends."""
        thread = threading.Thread(target=self._copy, args=(source, target), name="child output", daemon=True)
        self._threads.append(thread)
        thread.start()

    def last_lines(self) -> list[str]:
        """Returns the last lines when all is read; soon if a process outside the group still holds a pipe."""
        for thread in self._threads:
            thread.join(_LEFTOVER_SECONDS)
        with self._lock:
            return [_shown(line) for line in self._lines]

    def _copy(self, source: IO[bytes], target: int) -> None:
        partial = b""
        with source:
            while chunk := os.read(source.fileno(), 1 << 16):
                # When whoever reads our output is gone, the run goes on all the same.
                with contextlib.suppress(OSError):
                    _write(target, chunk)
                *whole, partial = (partial + chunk).split(b"\n")
                partial = partial[-_LINE_BYTES:]
                self._keep(whole)
        self._keep([partial] if partial else [])

    def _keep(self, lines: list[bytes]) -> None:
        with self._lock:
            self._lines.extend(line[-_LINE_BYTES:] for line in lines)


def _shown(line: bytes) -> str:
    """A line as a terminal shows it in the end: without what a carriage return has let be written over."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


@contextlib.contextmanager
def _guard(grace_seconds: float) -> Iterator[Callable[[int], None]]:
    """Yields a function that entrusts a process group to the guard, which ends it if this process dies meanwhile.

    The kernel's own means, PR_SET_PDEATHSIG, reaches one process and not those that it has started.
    """
    arguments = ["/bin/sh", "-c", _GUARD, "sh", str(math.ceil(grace_seconds))]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        arguments, bufsize=0, stdin=pipe, stdout=nothing, stderr=nothing, start_new_session=True
    ) as guard:

        def entrust(group: int) -> None:
            assert guard.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # somebody has ended the guard
                guard.stdin.write(f"{group}\n".encode())

        try:
            yield entrust
        finally:
            guard.kill()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # Python writes into a pipe in blocks of 8 KiB unless it is told otherwise: nothing would be seen for minutes.
    environment = {"PYTHONUNBUFFERED": "1", **os.environ}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command, stdin=nothing, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
    except OSError as error:
        raise UsageError(
            f"{command[0]!r} cannot be started: {error.strerror or error}; give a program, then its arguments"
        ) from error


def _wait(process: subprocess.Popen[bytes], wakeups: Wakeups, grace_seconds: float, watch: Callable[[], object]) -> int:
    """Returns the exit code of the process; passes signals on to its group, and kills it when its grace is over."""
    kill_at = math.inf
    while (code := process.poll()) is None:
        watch()
        left = kill_at - time.monotonic()
        if left <= 0:
            _LOG.warning("the command did not stop within %g s: it is killed", grace_seconds)
            _signal_group(process.pid, signal.SIGKILL)
            kill_at = left = math.inf
        for number in wakeups.wait(min(left, _WATCH_SECONDS)):
            _LOG.info("%s is sent to the command, which has %g s to save and stop", number.name, grace_seconds)
            _signal_group(process.pid, number)
            kill_at = min(kill_at, time.monotonic() + grace_seconds)
    return code


def _end_group(group: int, seconds: float) -> None:
    """Ends what is left of a process group: SIGTERM, then SIGKILL, with up to `seconds` after each."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        give_up = time.monotonic() + seconds
        alive = _signal_group(group, number)
        while alive and time.monotonic() < give_up:
            time.sleep(0.02)
            _reap_orphans(group)
            alive = _signal_group(group, 0)
        if not alive:
            return


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal, 0 for none, to a process group; returns whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap_orphans(group: int) -> None:
    """Where this process is the first of its container, it is the one to reap what the child has left behind."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
