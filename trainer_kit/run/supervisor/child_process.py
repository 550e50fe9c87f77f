"""Runs one supervised process and its children: forwards signals and output, and ends the whole process group.

The process has a separate process group. The rest of the group is ended after the first process has ended, when it
does not stop in time after a signal, and when this process itself is killed. POSIX only.
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

# Runs in a separate session; $1 is the grace time in seconds. It reads the process group from its input. The supervisor
# kills it when the group has ended, so if the second read ends, the supervisor has died.
_GUARD = """
read -r group || exit
read -r line && exit
kill -s TERM -- "-$group"
seconds=0
while [ "$seconds" -lt "$1" ] && kill -s 0 -- "-$group"; do sleep 1; seconds=$((seconds + 1)); done
kill -s KILL -- "-$group"
"""


class Wakeups:
    """While entered, SIGTERM, SIGHUP, SIGINT and SIGCHLD only end `wait`; in the main thread only.

    The handlers do nothing, so a signal is safe at any moment. SIGHUP stays ignored if it was, as under nohup.

    Attributes:
      stop: The stop signal seen by `wait` that decides the exit code, see `signals.deciding`; None: no signal.
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
        """Returns the stop signals that arrive within `seconds` (None: no limit); [] as soon as a process has ended."""
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
    """Runs a command to its end, and ends the processes that it leaves in its process group.

    Stop signals are sent on to the group, which is killed `grace_seconds` after the first of them. The command's
    standard output and error go to descriptors 1 and 2 as they arrive. Its standard input is empty.

    Args:
      command: The program and its arguments.
      wakeups: The signals of this process, already entered.
      grace_seconds: The seconds from a forwarded signal to SIGKILL.
      watch: Called about once a second while the command runs.

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
    """Copies the output of a process as it arrives, and keeps the last lines.

    It uses threads, so that signals are still forwarded when nobody reads the supervisor's output.
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
        """Returns the last lines once all is read; does not wait long if a process outside the group holds a pipe."""
        for thread in self._threads:
            thread.join(_LEFTOVER_SECONDS)
        with self._lock:
            return [_shown(line) for line in self._lines]

    def _copy(self, source: IO[bytes], target: int) -> None:
        partial = b""
        with source:
            while chunk := os.read(source.fileno(), 1 << 16):
                # The run continues when the reader of our output is gone.
                with contextlib.suppress(OSError):
                    _write(target, chunk)
                *lines, partial = (partial + chunk).split(b"\n")
                partial = partial[-_LINE_BYTES:]
                self._keep(lines)
        self._keep([partial] if partial else [])

    def _keep(self, lines: list[bytes]) -> None:
        with self._lock:
            self._lines.extend(line[-_LINE_BYTES:] for line in lines)


def _shown(line: bytes) -> str:
    """Returns a line as a terminal finally shows it: without text that was overwritten after a carriage return."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


@contextlib.contextmanager
def _guard(grace_seconds: float) -> Iterator[Callable[[int], None]]:
    """Yields a function that hands a process group to a guard process, which ends the group if this process dies.

    The kernel's PR_SET_PDEATHSIG would reach one process and not its children.
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
    # By default Python writes into a pipe in blocks of 8 KiB, so no output would be seen for minutes.
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
    """Returns the exit code of the process; forwards signals to its group, and kills it after the grace time."""
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
    """Ends the rest of a process group: SIGTERM, then SIGKILL, with up to `seconds` after each."""
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
    """Sends a signal, 0 for none, to a process group; returns whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap_orphans(group: int) -> None:
    """Reaps ended orphans of the group, which belong to this process if it is the first in its container."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
