"""Runs a command until it is done: starts it again when it was preempted or crashed, and not when that would not help.

The exit codes of trainer_kit.errors decide. No TensorFlow: that is for the command.
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
    """Runs `command` until it is done, and again when it was preempted or crashed; in the main thread only.

    A preempted run (exit code 75) is restarted at once, as often as it takes; after a wait while it gains no step.
    A crash (1, a signal, a code that is not ours) and a stall (7) count against `max_restarts`; the wait after them
    doubles each time, and is short again after one that has come further. Two of them in a row at the same step end it
    all: the next one would fail there too. Every other code ends it; restarts.OUTCOMES is the table.

    SIGTERM, SIGHUP (unless it is ignored) and SIGINT are passed on to the command's process group, and nothing is
    started after them. What the command
    prints goes to descriptors 1 and 2 as it comes. Each attempt becomes one line of `log_dir`/attempts.jsonl.

    Args:
      command: program and arguments.
      max_restarts: counted ones, 0 or more.
      log_dir: a local folder, as a rule the run's model_dir; no two supervisors may have the same.
      backoff_seconds: the first wait.
      most_backoff_seconds: the longest wait.
      grace_seconds: from a passed-on signal to SIGKILL.
      step: returns the step that was reached, None if there is no telling; called after each attempt. By default it is
        that of `run_dir`/heartbeat.json, if that was written since the attempt began, or of the newest checkpoint.
      until_begun: further arguments for what is to be done once: of each attempt until the run in `run_dir` has begun,
        or gone on, since this was called. Its manifest.json tells.
      run_dir: the run's model_dir, where that is not `log_dir`.

    Returns:
      The exit code of the last attempt. If a signal has ended that: 75 when the supervisor was asked to stop by SIGTERM
      or SIGHUP, 130 when it was only by SIGINT, else 1. 75 or 130, too, when it was asked to stop between two attempts.
      6 when there would be another attempt, but the run's folder was moved or removed.

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
            if wakeups.stop is not None:
                verdict = Verdict(False, 0.0, f"end: asked to stop by {wakeups.stop.name}")
            if verdict.restart and (lost := folder.hold()):
                _LOG.error("%s", lost)
                return ExitCode.STORAGE
            _tell(number, now, attempt, verdict, Path(log_dir))
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
    """One run of the command: its start (ISO time, UTC), its length, how and where it ended, its last lines."""

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


class _RunFolder(contextlib.ExitStack):
    """Holds the folder of a run as soon as the run has begun there, so that no attempt begins a second one.

    A run that has not begun may still remove its folder: it leaves nothing behind after a mistake.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._held: FolderIdentity | None = None

    def hold(self) -> str:
        """Holds the folder if it can be held; returns the reason when it was moved or removed since, "" if not."""
        if self._held is None and has_begun(self._path):
            with contextlib.suppress(StorageError):  # it went away meanwhile
                self._held = self.enter_context(FolderIdentity(self._path))
        return self._held.look() if self._held is not None else ""


class _StepReader:
    """The step that the run in `run_dir` has reached, if its heartbeat was written after this object was made.

    A heartbeat can be five seconds old, and be the first of all: the newest checkpoint may know of a later step, and
    the newest report, if one came, does.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = os.fspath(run_dir)
        self._before, self._told = read_heartbeat(run_dir), self._reports()

    def __call__(self) -> int | None:
        heartbeat = read_heartbeat(self._run_dir)
        if heartbeat is None or (self._before is not None and heartbeat["beat"] == self._before["beat"]):
            return None
        return max(heartbeat["step"], *complete_checkpoints(self._run_dir), self._reported())

    def _reported(self) -> int:
        if self._reports() == self._told:
            return 0  # what there is may be of the attempt before
        with contextlib.suppress(StorageError):
            newest = newest_report(os.path.join(self._run_dir, _METRICS), "train")
            return int(newest["step"]) if newest else 0
        return 0

    def _reports(self) -> tuple[int, int] | None:
        """Tells one state of the history from another."""
        try:
            found = os.stat(os.path.join(self._run_dir, _METRICS))
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


def _tell(number: int, command: Sequence[str], attempt: _Attempt, verdict: Verdict, log_dir: Path) -> None:
    """Logs what an attempt has come to, and appends it to attempts.jsonl; a disk that fails does not stop the run."""
    cause = outcome(attempt.code)[0]
    heard = ", last reported" if attempt.code < 0 else ""  # the heartbeat of a killed process is seconds old
    where = "" if attempt.step is None else f"{heard} at step {attempt.step}"
    level = logging.WARNING if attempt.code else logging.INFO
    _LOG.log(level, "attempt %d: %s%s after %.1f s; %s", number, cause, where, attempt.seconds, verdict.text)
    if attempt.code in (ExitCode.USAGE, ExitCode.STORAGE) and not log_dir.exists():
        return  # a run that never got so far leaves nothing behind, and one whose folder was moved nothing at that path
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
