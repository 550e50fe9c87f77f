"""Runs a command until it is done, and restarts it after a preemption or a crash, unless a restart cannot help.

The exit codes of trainer_kit.errors decide. The supervisor does not import TensorFlow. POSIX only.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import IO

from trainer_kit import files
from trainer_kit.errors import ExitCode, StorageError, UsageError
from trainer_kit.process.run_directory import count_starts
from trainer_kit.process.signals import select_deciding_signal
from trainer_kit.process.startup_signals import get_signal_exit_code, get_stop_signals

_MAX_TIME_IS_OVER = "stopped by trainer.max_time"  # as StopSignals says it
_LOG_BYTES = 4000  # the end of the output of an attempt
_POLL_SECONDS = 0.05
_LAST_OUTPUT_SECONDS = 2.0  # a process that left the process group may keep the pipe open
_LOG = logging.getLogger(__name__)


class Decision(enum.Enum):
    """What follows an exit code."""

    END = "end"
    RESTART = "restart, not counted"
    RETRY = "restart, counted"


def classify_exit_code(code: int) -> tuple[str, Decision]:
    """Returns the cause and the decision for an exit code; a negative code is minus the number of a signal."""
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})", Decision.RETRY
    if code not in set(ExitCode):
        return f"crashed with exit code {code}", Decision.RETRY
    cause = ExitCode(code).name.lower().replace("_", " ")
    if code == ExitCode.PREEMPTED:
        return cause, Decision.RESTART
    return cause, Decision.RETRY if code in (ExitCode.BUG, ExitCode.STALLED) else Decision.END


def supervise(
    command: Sequence[str],
    *,
    max_restarts: int,
    log_dir: str | os.PathLike[str],
    backoff_seconds: float = 1.0,
    max_backoff_seconds: float = 60.0,
    grace_seconds: float = 30.0,
    first_attempt_arguments: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Runs `command` until it is done, and restarts it after a preemption or a crash; in the main thread only.

    A preempted run (exit code 75) is restarted any number of times, unless `trainer.max_time`
    stopped it. A crash (code 1, a signal, a code that is not ours) and a stall (7) count against
    `max_restarts`. Every other code ends the supervisor. The wait before a restart doubles each
    time, up to `max_backoff_seconds`, and is short again after an attempt that lasted longer than
    that.

    SIGTERM, SIGHUP (unless it is ignored) and SIGINT are sent on to the command's process group,
    and no attempt starts after them. What is left of the group is killed when the command has
    ended. Each attempt becomes one line of `log_dir`/attempts.jsonl.

    Args:
      command: The program and its arguments.
      max_restarts: The number of restarts after crashes and stalls, 0 or more.
      log_dir: A local folder, usually the run's model_dir; each supervisor needs its own.
      backoff_seconds: The first wait, in seconds.
      max_backoff_seconds: The longest wait, in seconds.
      grace_seconds: The seconds from a forwarded signal to SIGKILL.
      first_attempt_arguments: Further arguments for actions that happen once. Attempts get them
        until the run in `run_dir` has started or resumed since this call, as its manifest.json
        shows.
      run_dir: The run's model_dir; None: `log_dir`.

    Returns:
      The exit code of the last attempt. If a signal ended that attempt: 75 when SIGTERM or SIGHUP
      asked the supervisor to stop, 130 when only SIGINT did, else 1. Also 75 or 130 when the
      supervisor was asked to stop between two attempts.

    Raises:
      UsageError: when `log_dir` is a remote folder.
    """
    if files.is_remote(log_dir):
        raise UsageError(
            f"log_dir: {log_dir!r} is a remote folder; mount it and give the path of the mount"
        )
    run_dir = log_dir if run_dir is None else run_dir
    starts_before = count_starts(run_dir)
    wait = backoff_seconds
    crashes = 0
    number = 0

    with _collect_stop_signals() as received:
        while True:
            number += 1
            has_begun = count_starts(run_dir) > starts_before
            arguments = [*command] if has_begun else [*command, *first_attempt_arguments]
            started = datetime.now(timezone.utc)
            code, log = _run(arguments, received, grace_seconds)

            seconds = (datetime.now(timezone.utc) - started).total_seconds()
            if seconds > max_backoff_seconds:
                wait = backoff_seconds
            cause, decision = classify_exit_code(code)
            if decision is Decision.RETRY:
                crashes += 1

            end = ""
            if received:  # a launcher may send several
                end = f"asked to stop by {functools.reduce(select_deciding_signal, received).name}"
            elif code == ExitCode.PREEMPTED and any(_MAX_TIME_IS_OVER in line for line in log):
                end = "trainer.max_time is over"
            elif decision is Decision.END:
                end = "a restart would not help" if code else "nothing is left to do"
            elif crashes > max_restarts:
                end = f"no restart is left of {max_restarts}"
            verdict = f"end: {end}" if end else f"restart in {wait:g} s"

            level = logging.WARNING if code else logging.INFO
            _LOG.log(level, "attempt %d: %s after %.1f s; %s", number, cause, seconds, verdict)
            record = {
                "attempt": number,
                "command": arguments,
                "started": started.isoformat(timespec="seconds"),
                "seconds": seconds,
                "exit_code": code,
                "cause": cause,
                "decision": verdict,
                "log": log,
            }
            # A run that did not begin leaves nothing behind.
            if os.path.exists(log_dir) or code not in (ExitCode.USAGE, ExitCode.STORAGE):
                try:
                    files.append_json_line(os.path.join(log_dir, "attempts.jsonl"), record)
                except StorageError as error:
                    _LOG.warning("%s", error)

            if end and code >= 0:
                return code
            if end and not received:
                return ExitCode.BUG

            next_start = time.monotonic() + wait
            while not received and time.monotonic() < next_start:
                time.sleep(_POLL_SECONDS)
            if received:
                return get_signal_exit_code(functools.reduce(select_deciding_signal, received))
            wait = min(max_backoff_seconds, 2 * wait)


@contextlib.contextmanager
def _collect_stop_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list to which each stop signal is added as it arrives; SIGHUP stays ignored if it was."""
    received: list[signal.Signals] = []

    def receive(number: int, frame: object) -> None:
        received.append(signal.Signals(number))

    handlers = {number: signal.signal(number, receive) for number in get_stop_signals()}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run(
    command: list[str], received_signals: list[signal.Signals], grace_seconds: float
) -> tuple[int, list[str]]:
    """Returns a command's exit code and the last lines of its errors; passes on the signals that arrive."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    tail = bytearray()
    # In a thread, so that signals are still passed on when nobody reads the supervisor's output.
    copier = threading.Thread(target=_copy_errors, args=(process.stderr, tail), daemon=True)
    copier.start()

    passed_on = 0
    kill_at = 0.0  # after the first signal
    while (code := process.poll()) is None:
        time.sleep(_POLL_SECONDS)
        for number in received_signals[passed_on:]:
            _signal_group(process.pid, number)
            kill_at = kill_at or time.monotonic() + grace_seconds
            passed_on += 1
        if kill_at and time.monotonic() > kill_at:
            _signal_group(process.pid, signal.SIGKILL)

    _signal_group(process.pid, signal.SIGKILL)  # for its children
    copier.join(_LAST_OUTPUT_SECONDS)
    return code, bytes(tail).decode(errors="replace").splitlines()


def _copy_errors(source: IO[bytes], tail: bytearray) -> None:
    """Copies `source` to our standard error as it arrives, and keeps the last bytes in `tail`."""
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # the run continues when nobody reads our output
                os.write(2, chunk)
            tail += chunk
            del tail[:-_LOG_BYTES]


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(group, number)
