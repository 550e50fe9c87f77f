"""Runs a command until it is done, and restarts it after a preemption or a crash, unless a restart cannot help.

The exit codes of trainer_kit.errors decide. The supervisor does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.errors import ExitCode, StorageError, UsageError
from trainer_kit.folder_identity import FolderIdentity
from trainer_kit.process.run_directory import count_starts, has_begun
from trainer_kit.process.run_lock import read_heartbeat
from trainer_kit.process.startup_signals import exit_code
from trainer_kit.run.supervisor.child_process import Wakeups, run
from trainer_kit.run.supervisor.restart_rules import Policy, Verdict, outcome
from trainer_kit.telemetry.metrics_jsonl import newest_report

ATTEMPTS = "attempts.jsonl"
_METRICS = "metrics.jsonl"
_OVER = "stopped by trainer.max_time"  # as StopSignals says it
_LOG = logging.getLogger(__name__)


def supervise(
    command: Sequence[str],
    *,
    max_restarts: int,
    log_dir: str | os.PathLike[str],
    backoff_seconds: float = 1.0,
    most_backoff_seconds: float = 60.0,
    grace_seconds: float = 30.0,
    step: Callable[[], int | None] | None = None,
    until_begun: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Runs `command` until it is done, and restarts it after a preemption or a crash; in the main thread only.

    A preempted run (exit code 75) is restarted at once, any number of times; if it gained no step, after a wait. A run
    whose trainer.max_time is over (75, too) is not restarted.
    A crash (code 1, a signal, a code that is not ours) and a stall (7) count against `max_restarts`. The wait after
    them doubles each time, and is short again after an attempt that reached a later step. Two of them in a row at the
    same step end the supervisor, since the next attempt would fail there too. Every other code ends it; the table is
    restart_rules.OUTCOMES.

    SIGTERM, SIGHUP (unless it is ignored) and SIGINT are sent on to the command's process group, and no attempt starts
    after them. The command's output goes to descriptors 1 and 2 as it arrives. Each attempt becomes one line of
    `log_dir`/attempts.jsonl.

    Args:
      command: The program and its arguments.
      max_restarts: The number of restarts after crashes and stalls, 0 or more.
      log_dir: A local folder, usually the run's model_dir; each supervisor needs its own.
      backoff_seconds: The first wait, in seconds.
      most_backoff_seconds: The longest wait, in seconds.
      grace_seconds: The seconds from a forwarded signal to SIGKILL.
      step: Called after each attempt; returns the step that was reached, None if it is not known. By default it reads
        `run_dir`/heartbeat.json, if that was written during the attempt, and the newest checkpoint.
      until_begun: Further arguments for actions that happen once. Attempts get them until the run in `run_dir` has
        started or resumed since this call, as its manifest.json shows.
      run_dir: The run's model_dir; None: `log_dir`.

    Returns:
      The exit code of the last attempt. If a signal ended that attempt: 75 when SIGTERM or SIGHUP asked the supervisor
      to stop, 130 when only SIGINT did, else 1. Also 75 or 130 when the supervisor was asked to stop between two
      attempts. 6 when the run's folder was moved or removed before another attempt.

    Raises:
      UsageError: when an argument is not allowed, the command cannot be started, or this is not the main thread.
    """
    _check(command, max_restarts, log_dir)
    policy = Policy(max_restarts, backoff_seconds, most_backoff_seconds)
    log_dir = files.follow_links(os.fspath(log_dir))
    run_dir = log_dir if run_dir is None else files.follow_links(os.fspath(run_dir))
    starts, number = count_starts(run_dir), 0
    with Wakeups() as wakeups, _RunFolder(run_dir) as folder:
        while True:
            number += 1
            now = [*command, *until_begun] if count_starts(run_dir) <= starts else command
            reader = _StepReader(run_dir) if step is None else step
            attempt = _attempt(now, wakeups, grace_seconds, reader, folder.hold)
            wakeups.wait(0)
            verdict = policy.after(attempt.code, attempt.step, seconds=attempt.seconds, silent=step is not None)
            if over := _over(attempt, wakeups.stop):
                verdict = Verdict(False, 0.0, f"end: {over}")
            if verdict.restart and (lost := folder.hold()):
                _LOG.error("%s", lost)
                return ExitCode.STORAGE
            _record_attempt(number, now, attempt, verdict, Path(log_dir))
            if not verdict.restart:
                return _final_code(attempt.code, wakeups.stop)
            wakeups.pause(verdict.seconds)
            if wakeups.stop is None and (lost := folder.hold()):
                _LOG.error("%s", lost)
                return ExitCode.STORAGE
            if wakeups.stop is not None:
                _LOG.info("attempt %d is not started: asked to stop by %s", number + 1, wakeups.stop.name)
                return exit_code(wakeups.stop)


@dataclass(frozen=True)
class _Attempt:
    """One run of the command: start (ISO time, UTC), seconds, exit code, step reached, last lines of output."""

    started: str
    seconds: float
    code: int
    step: int | None
    lines: list[str]


def _attempt(
    command: Sequence[str],
    wakeups: Wakeups,
    grace_seconds: float,
    step: Callable[[], int | None],
    watch: Callable[[], object],
) -> _Attempt:
    started, clock = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    code, lines = run(command, wakeups, grace_seconds, watch)
    return _Attempt(started, time.monotonic() - clock, code, step(), lines)


def _over(attempt: _Attempt, stop: signal.Signals | None) -> str:
    """Returns why no attempt follows, whatever the exit code says; "" if the exit code decides."""
    if stop is not None:
        return f"asked to stop by {stop.name}"
    over = attempt.code == ExitCode.PREEMPTED and any(_OVER in line for line in attempt.lines)
    return "trainer.max_time is over" if over else ""


class _RunFolder(contextlib.ExitStack):
    """Keeps the identity of a run's folder once the run has begun, so that no restart begins a second run in its place.

    A run that ends before that, for example because of a mistake in its config, may remove its folder.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._held: FolderIdentity | None = None

    def hold(self) -> str:
        """Holds the folder if the run has begun; returns the message if the held folder is gone, else ""."""
        if self._held is None and has_begun(self._path):
            with contextlib.suppress(StorageError):  # the folder was removed meanwhile
                self._held = self.enter_context(FolderIdentity(self._path))
        return self._held.look() if self._held is not None else ""


class _StepReader:
    """Returns the step that the run in `run_dir` has reached, if its heartbeat was written after this object was made.

    A heartbeat can be five seconds old, so the newest checkpoint and the newest report may have a later step.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = os.fspath(run_dir)
        self._before, self._reports_before = read_heartbeat(run_dir), self._reports()

    def __call__(self) -> int | None:
        heartbeat = read_heartbeat(self._run_dir)
        if heartbeat is None or (self._before is not None and heartbeat["beat"] == self._before["beat"]):
            return None
        return max(heartbeat["step"], *complete_checkpoints(self._run_dir), self._reported())

    def _reported(self) -> int:
        if self._reports() == self._reports_before:
            return 0  # the reports may be those of the previous attempt
        with contextlib.suppress(StorageError):
            newest = newest_report(os.path.join(self._run_dir, _METRICS), "train")
            return int(newest["step"]) if newest else 0
        return 0

    def _reports(self) -> tuple[int, int] | None:
        """Returns time and size of metrics.jsonl, which change with each report; None without the file."""
        try:
            found = os.stat(os.path.join(self._run_dir, _METRICS))
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


def _record_attempt(number: int, command: Sequence[str], attempt: _Attempt, verdict: Verdict, log_dir: Path) -> None:
    """Logs the end of an attempt and appends it to attempts.jsonl; a failing disk causes only a warning."""
    cause = outcome(attempt.code)[0]
    heard = ", last reported" if attempt.code < 0 else ""  # the heartbeat of a killed process is seconds old
    where = "" if attempt.step is None else f"{heard} at step {attempt.step}"
    level = logging.WARNING if attempt.code else logging.INFO
    _LOG.log(level, "attempt %d: %s%s after %.1f s; %s", number, cause, where, attempt.seconds, verdict.text)
    if attempt.code in (ExitCode.USAGE, ExitCode.STORAGE) and not log_dir.exists():
        return  # a run that did not begin leaves nothing behind, and a moved folder is not made again
    record = {
        "attempt": number,
        "command": list(command),
        "started": attempt.started,
        "seconds": round(attempt.seconds, 3),
        "exit_code": attempt.code,
        "cause": cause,
        "step": attempt.step,
        "decision": verdict.text,
        "log": attempt.lines,
    }
    try:
        files.append_line(log_dir / ATTEMPTS, record)
    except StorageError as error:
        _LOG.warning("%s", error)


def _final_code(code: int, stop: signal.Signals | None) -> int:
    if code >= 0:
        return code
    return ExitCode.BUG if stop is None else exit_code(stop)


def _check(command: Sequence[str], max_restarts: int, log_dir: str | os.PathLike[str]) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("supervise handles signals, which only the main thread of a process can do; call it there")
    if isinstance(command, str) or not command:
        raise UsageError(f"command: {command!r} is not a list of a program and its arguments")
    if max_restarts < 0:
        raise UsageError(f"max_restarts: {max_restarts} is not a number of restarts; give 0 or more")
    if files.is_remote(log_dir):
        raise UsageError(
            f"log_dir, the run's model_dir: {os.fspath(log_dir)!r} is a remote folder; only local and "
            "mounted folders are allowed: mount it (gcsfuse, s3fs, ...) and give the path of the mount"
        )
