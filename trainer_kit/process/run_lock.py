"""Allows at most one trainer in a model_dir: a lock that the kernel holds, and a heartbeat that names the trainer.

`trainer.lock` is locked by flock(2), which the kernel releases however the process ends, kill -9 included. The file
itself stays. Only a run that leaves nothing behind removes it, while it holds the lock. Then two processes could lock
two files of the same name, so a process that has locked a file checks that the name still refers to it.
`heartbeat.json` names the holder of the lock. It replaces the lock between machines whose shared file system does not
share flock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from trainer_kit import files
from trainer_kit.errors import ExitCode, InterruptedRunError, ModelDirInUseError, PreemptedError, StorageError
from trainer_kit.process.watchdog import ProgressReader, call_within

LOCK, HEARTBEAT = "trainer.lock", "heartbeat.json"
Ended = Literal["done", "stopped", "failed"]

_LOG = logging.getLogger(__name__)
_KINDS = {"host": str, "pid": int, "started": str, "step": int, "phase": str, "beat": str}
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_BEATS_TO_WATCH = 4
_GRACE = 1.0  # seconds in which the holder of the lock writes its first heartbeat, or finishes ending
_LAST_BEAT = 10.0  # seconds that the last heartbeat may take on a disk that hangs
_LAST_MOMENT = 2.0  # seconds that all locks may take before the process is ended
_TIMES = 3  # tries to open the lock at once, when its last holder has just removed it


def read_heartbeat(model_dir: str | os.PathLike[str], name: str = HEARTBEAT) -> dict[str, Any] | None:
    """Returns the heartbeat of the process that trains or trained in `model_dir`; None if it is missing or damaged.

    Args:
      model_dir: The folder of the run.
      name: The name of the file; another lock has another one.

    Returns:
      A dict with "host" and "pid" of the process; "started" and "beat", ISO times in UTC by its clock (only compare
      them for change); "phase" and "step"; "ended": None while it lives, else "done", "stopped" or "failed". A killed
      process leaves None.
    """
    try:
        value = files.parse_json((Path(model_dir) / name).read_bytes())
    except (OSError, ValueError):
        return None
    valid = isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in _KINDS.items())
    return value if valid and "ended" in value else None


def runs(pid: int) -> bool:
    """Whether this machine has a process with this pid; True if that cannot be found out."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's process, or not a valid pid
    return True


def check_not_held(model_dir: str | os.PathLike[str]) -> None:
    """Raises ModelDirInUseError when another process of this machine trains in `model_dir` now; takes no lock.

    This is an early check. Only RunLock is sure.
    """
    lock = RunLock(model_dir)
    with contextlib.suppress(OSError):
        descriptor = os.open(Path(model_dir) / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise lock._in_use(read_heartbeat(model_dir)) from None
        finally:
            os.close(descriptor)


class RunLock:
    """While entered, this process is the only trainer in `model_dir`, and writes a heartbeat every `beat_seconds`.

    If the lock is free but the last heartbeat comes from another machine and has not ended, the heartbeat is watched
    for four beats: if it changes, a trainer lives there that flock does not show. The same happens if the file system
    has no flock, where two trainers that start at the same moment are not noticed.

    Only this process holds the lock: programs that it starts do not inherit it (O_CLOEXEC), and a forked child drops
    it. So no child that outlives the trainer keeps the lock.

    Args:
      model_dir: A local folder; made if it is missing.
      progress: Returns (phase, step); called in a thread, where it may be slow or raise.
      host: The name of this machine; None: its host name.
      beat_seconds: The seconds between two heartbeats.
      record: The file without which there is nothing to resume: if an error ends the block before it exists, lock and
        heartbeat are removed, and the folder if it is then empty. None: they always stay.
      names: The names of the lock file and of the heartbeat file.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        progress: Callable[[], tuple[str, int]] = lambda: ("start", 0),
        *,
        host: str | None = None,
        beat_seconds: float = 5.0,
        record: str | os.PathLike[str] | None = None,
        names: tuple[str, str] = (LOCK, HEARTBEAT),
    ) -> None:
        self._folder = Path(model_dir)
        self._lock_name, self._heartbeat_name = names
        self._writing = threading.Lock()
        self._host = host or socket.gethostname()
        self._seconds = beat_seconds
        self._record = record
        self._started = _now()
        self._ended: Ended | None = None
        self._failed = False
        self._descriptor = -1
        self._locked = False
        self._left = threading.Event()
        self._releasing = threading.Lock()
        self._reader = ProgressReader(lambda: _typed(*progress()), min(1.0, beat_seconds))
        self._thread = threading.Thread(target=self._serve, name="heartbeat", daemon=True)

    @property
    def phase(self) -> str:
        """The last phase that `progress` returned; "start" at first."""
        return self._reader.latest[0]

    @property
    def step(self) -> int:
        """The last step that `progress` returned; 0 at first."""
        step = self._reader.latest[1]
        assert isinstance(step, int)
        return step

    def __enter__(self) -> RunLock:
        """Takes the lock.

        Raises:
          ModelDirInUseError: when another trainer holds it; within two seconds if that is on this machine.
          StorageError: when the folder cannot be written.
        """
        self._descriptor = _open(self._folder / self._lock_name)
        _held.add(self)
        try:
            self._claim()
            call_within(_GRACE, self._reader.read)
            self._write()
        except BaseException:
            self._close()
            raise
        self._reader.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(_end_of(error), withdraw=error is not None and not self.is_recorded())

    def is_recorded(self) -> bool:
        """Whether there is something to resume, so that lock and heartbeat stay after an error."""
        return self._record is None or os.path.exists(self._record)

    def release(self, ended: Ended, *, withdraw: bool = False) -> None:
        """Writes the last heartbeat, which says how the run ended, and releases the lock; once, in any thread.

        Args:
          ended: How the run ended.
          withdraw: Whether to remove lock and heartbeat first, and the folder if it is then empty. They stay if the
            file system has no locks, since they may already belong to another trainer.
        """
        with self._releasing:
            if self._descriptor < 0:
                return
            self._reader.stop()
            call_within(_GRACE, self._reader.read)
            self._ended = ended
            self._left.set()
            self._thread.join(_LAST_BEAT)
            if withdraw and not self._thread.is_alive() and self._locked:
                # Another trainer may have replaced the lock file.
                if _is_at(self._folder / self._lock_name, self._descriptor):
                    self._remove()
            self._close()

    def _heartbeat(self) -> dict[str, Any] | None:
        return read_heartbeat(self._folder, self._heartbeat_name)

    def _remove(self) -> None:
        # In this order: without the lock another trainer may come and write both.
        for name in (self._heartbeat_name, self._lock_name):
            with contextlib.suppress(OSError):
                os.remove(self._folder / name)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _claim(self) -> None:
        """Returns once the folder is ours: it is locked, and no heartbeat shows a trainer that the lock misses."""
        self._locked = self._lock()
        there = self._heartbeat()
        if there is not None and not there["ended"]:
            who = f"{there['host']} pid {there['pid']}"
            if (not self._locked or there["host"] != self._host) and not self._falls_silent(there, who):
                return
            _LOG.warning("the run of %s in this folder was cut off; this process takes it over", who)
        # Of trainers that were killed while they wrote.
        for path in self._folder.glob(f".{self._heartbeat_name}.*.tmp"):
            path.unlink(missing_ok=True)

    def _lock(self) -> bool:
        """Takes the lock; returns whether the file system has locks."""
        give_up = time.monotonic() + _GRACE
        try:
            while not self._try_lock():
                holder = self._heartbeat()
                known = (
                    holder is not None and not holder["ended"] and (holder["host"] != self._host or runs(holder["pid"]))
                )
                if known or time.monotonic() > give_up:
                    raise self._in_use(holder if known else None)
                time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise StorageError(
                    f"{self._folder / self._lock_name} cannot be locked: {error.strerror or error}"
                ) from error
            _LOG.warning(
                "%s: the file system has no locks (%s); only %s shows whether another trainer runs there, "
                "and two trainers that start at the same moment are not noticed",
                self._folder,
                error.strerror,
                self._heartbeat_name,
            )
            return False
        return True

    def _try_lock(self) -> bool:
        """Locks the file that has the name now, even if it was replaced; returns False if another process holds it."""
        for _ in range(_TIMES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            path = self._folder / self._lock_name
            if _is_at(path, self._descriptor):
                return True
            removed, self._descriptor = self._descriptor, _open(path)
            os.close(removed)
        return False

    def _falls_silent(self, there: dict[str, Any], who: str) -> bool:
        """Watches a heartbeat: returns True if it has stopped, False if its run ends meanwhile; raises if it beats."""
        seconds = _BEATS_TO_WATCH * self._seconds
        _LOG.warning("%s was in use by %s; watching for %g s whether it is still in use", self._folder, who, seconds)
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            time.sleep(self._seconds / 10)
            now = self._heartbeat()
            if now is not None and now["ended"]:
                return False
            if now is not None and now["beat"] != there["beat"]:
                raise self._in_use(now)
        return True

    def _in_use(self, holder: dict[str, Any] | None) -> ModelDirInUseError:
        other = "or give another model_dir"
        if holder is None:
            return ModelDirInUseError(
                f"{self._folder} is in use by another trainer, which {HEARTBEAT} does not name; "
                f"`fuser -v {self._folder / LOCK}` shows its pid; wait until it ends, stop it, {other}"
            )
        host, pid = holder["host"], holder["pid"]
        return ModelDirInUseError(
            f"{self._folder} is in use: {host} pid {pid} has trained there since {holder['started']} (step "
            f"{holder['step']} at its last heartbeat); wait until it ends, stop it (`kill {pid}` on {host}), {other}"
        )

    def _serve(self) -> None:
        while not self._left.wait(self._seconds):
            self.beat()
        self.beat()

    def beat(self) -> None:
        """Writes the heartbeat now; logs the first error."""
        if not (self._folder / self._lock_name).exists():
            return  # somebody has moved the folder, and the heartbeat would make it again
        try:
            self._write()
        except StorageError as error:
            if not self._failed:
                _LOG.warning("the heartbeat cannot be written, so others cannot see that this run is alive: %s", error)
            self._failed = True

    def _write(self) -> None:
        with self._writing:
            files.write_json(self._folder / self._heartbeat_name, self._entries(), point="heartbeat")

    def _entries(self) -> dict[str, Any]:
        return {
            "host": self._host,
            "pid": os.getpid(),
            "started": self._started,
            "step": self.step,
            "phase": self.phase,
            "beat": _now(),
            "ended": self._ended,
        }

    def _close(self) -> None:
        _held.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1


_held: set[RunLock] = set()


def release_all() -> None:
    """Releases all locks of this process, which a signal is about to end; in any thread, within two seconds.

    Locks of runs that are not recorded are removed with their heartbeats.
    """

    def release() -> None:
        for lock in list(_held):
            lock.release("stopped", withdraw=not lock.is_recorded())

    call_within(_LAST_MOMENT, release)


def _drop_in_child() -> None:
    # Closing keeps the parent's lock: it lasts as long as any descriptor of the same open file.
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_drop_in_child)


def _open(path: Path, times: int = _TIMES) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if times > 1 and error.errno in (errno.ENOENT, errno.EEXIST):
            return _open(path, times - 1)  # the last trainer may have just removed the folder
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; give a model_dir that this user can write to"
        ) from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _end_of(error: BaseException | None) -> Ended:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done"
    if isinstance(error, SystemExit):
        return "stopped" if error.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED) else "failed"
    return "stopped" if isinstance(error, (PreemptedError, InterruptedRunError, KeyboardInterrupt)) else "failed"


def _typed(phase: str, step: int) -> tuple[str, int]:
    return str(phase), int(step)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
