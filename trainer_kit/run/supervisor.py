"""Runs a command until it is done, and restarts it after a preemption or a crash.

The exit codes of trainer_kit.errors decide whether a restart can help. The supervisor does not
import TensorFlow. POSIX only.
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
from datetime import UTC, datetime
from types import FrameType
from typing import IO

from trainer_kit import files
from trainer_kit.errors import ExitCode, StorageError, UsageError
from trainer_kit.process.run_directory import count_starts
from trainer_kit.process.signals import select_deciding_signal
from trainer_kit.process.startup_signals import get_signal_exit_code, get_stop_signals

# As StopSignals says it.
_MAX_TIME_IS_OVER = "stopped by trainer.max_time"

# The length of the end of an attempt's output that is kept.
_LOG_BYTES = 4000
_POLL_SECONDS = 0.05

# A process that left the process group may keep the pipe open.
_LAST_OUTPUT_SECONDS = 2.0
_LOG = logging.getLogger(__name__)


class Decision(enum.Enum):
    """What follows an exit code."""

    END = "end"
    RESTART = "restart, not counted"
    RETRY = "restart, counted"


def classify_exit_code(code: int) -> tuple[str, Decision]:
    """Returns the cause and the decision for an exit code.

    A negative code is minus the number of a signal.
    """
    if code < 0:
        description = signal.strsignal(-code)
        return f"killed by signal {-code} ({description})", Decision.RETRY
    if code not in set(ExitCode):
        return f"crashed with exit code {code}", Decision.RETRY
    cause = ExitCode(code).name.lower().replace("_", " ")
    if code == ExitCode.PREEMPTED:
        return cause, Decision.RESTART
    if code in (ExitCode.BUG, ExitCode.STALLED):
        return cause, Decision.RETRY
    return cause, Decision.END


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
    """Runs `command` until it is done, and restarts it after a preemption or a crash.

    Callable in the main thread only.

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
      log_dir: A local folder, usually the run's model_dir. Each supervisor needs its own.
      backoff_seconds: The first wait, in seconds.
      max_backoff_seconds: The longest wait, in seconds.
      grace_seconds: The seconds from a forwarded signal to SIGKILL.
      first_attempt_arguments: Further arguments for actions that happen once. Attempts get them
        until the run in `run_dir` has started or resumed since this call, as its manifest.json
        shows.
      run_dir: The run's model_dir. None means `log_dir`.

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
    if run_dir is None:
        run_dir = log_dir
    starts_before = count_starts(run_dir)
    wait = backoff_seconds
    crashes = 0
    number = 0

    with _collect_stop_signals() as received_signals:
        while True:
            # One attempt.
            number += 1
            has_begun = count_starts(run_dir) > starts_before
            arguments = [*command] if has_begun else [*command, *first_attempt_arguments]
            start = datetime.now(UTC)
            code, log = _run(arguments, received_signals, grace_seconds)

            seconds = (datetime.now(UTC) - start).total_seconds()
            if seconds > max_backoff_seconds:
                wait = backoff_seconds
            cause, decision = classify_exit_code(code)
            if decision is Decision.RETRY:
                crashes += 1

            # Why it was the last attempt, if it was.
            end = ""
            if received_signals:
                # A launcher may send several.
                deciding_signal = functools.reduce(select_deciding_signal, received_signals)
                end = f"asked to stop by {deciding_signal.name}"
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
                "started": start.isoformat(timespec="seconds"),
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
            if end and not received_signals:
                return ExitCode.BUG

            # The wait before the next attempt, which a signal ends.
            next_start = time.monotonic() + wait
            while not received_signals and time.monotonic() < next_start:
                time.sleep(_POLL_SECONDS)
            if received_signals:
                deciding_signal = functools.reduce(select_deciding_signal, received_signals)
                return get_signal_exit_code(deciding_signal)
            wait = min(max_backoff_seconds, 2 * wait)


@contextlib.contextmanager
def _collect_stop_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list to which each stop signal is added as it arrives.

    SIGHUP stays ignored if it was.
    """
    received_signals: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received_signals.append(signal.Signals(number))

    handlers = {number: signal.signal(number, receive) for number in get_stop_signals()}
    try:
        yield received_signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run(
    command: list[str], received_signals: list[signal.Signals], grace_seconds: float
) -> tuple[int, list[str]]:
    """Runs a command, and passes on the signals that arrive.

    Returns:
      The exit code and the last lines of the errors.
    """
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

    passed_count = 0
    # The end of the grace time, which the first signal begins.
    kill_time = 0.0
    while (code := process.poll()) is None:
        time.sleep(_POLL_SECONDS)
        for number in received_signals[passed_count:]:
            _signal_group(process.pid, number)
            kill_time = kill_time or time.monotonic() + grace_seconds
            passed_count += 1
        if kill_time and time.monotonic() > kill_time:
            _signal_group(process.pid, signal.SIGKILL)

    # Its children may still run.
    _signal_group(process.pid, signal.SIGKILL)
    copier.join(_LAST_OUTPUT_SECONDS)
    return code, bytes(tail).decode(errors="replace").splitlines()


def _copy_errors(source: IO[bytes], tail: bytearray) -> None:
    """Copies `source` to the standard error as it arrives, and keeps the last bytes in `tail`."""
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            # The run continues when nobody reads the output of the supervisor.
            with contextlib.suppress(OSError):
                os.write(2, chunk)
            tail += chunk
            del tail[:-_LOG_BYTES]


def _signal_group(group: int, number: int) -> None:
    # The group may have ended.
    with contextlib.suppress(OSError):
        os.killpg(group, number)
