"""Allows at most one trainer in a model_dir, by a lock and a heartbeat.

`trainer.lock` is locked by flock(2), which the kernel releases however the process ends, kill -9
included. The file itself stays. Only a run that leaves nothing behind removes it, while it holds
the lock. Then two processes could lock two files of the same name, so a process that has locked a
file checks that the name still refers to it.

`heartbeat.json` names the holder of the lock. It replaces the lock between machines whose shared
file system does not share flock.
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
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NotRequired, TypedDict, cast

from trainer_kit import files
from trainer_kit.errors import (
    ExitCode,
    InterruptedRunError,
    ModelDirInUseError,
    PreemptedError,
    StorageError,
)
from trainer_kit.process.watchdog import ProgressReader, call_within

LOCK = "trainer.lock"
HEARTBEAT = "heartbeat.json"
EndState = Literal["done", "stopped", "failed"]


class Heartbeat(TypedDict):
    """The content of a heartbeat file.

    Attributes:
      host: The machine of the process.
      pid: The process.
      started: The time of the start. Times are ISO times in UTC by the clock of the process. Only
        compare them for change.
      step: The step of the process.
      phase: The phase of the process.
      beat: The time of the heartbeat.
      ended: How the run ended. None while the process lives, and after a kill.
      earlier: The last heartbeats of earlier processes of the run, the oldest first. Each has about
        200 bytes, so the file of a run with a thousand attempts has 0.2 MB.
    """

    host: str
    pid: int
    started: str
    step: int
    phase: str
    beat: str
    ended: EndState | None
    earlier: NotRequired[list[dict[str, Any]]]


_LOG = logging.getLogger(__name__)
_KINDS = {"host": str, "pid": int, "started": str, "step": int, "phase": str, "beat": str}

# The errors of a file system without flock.
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

# The number of beats for which the heartbeat of another machine is watched.
_BEATS_TO_WATCH = 4

# The seconds in which the holder of the lock writes its first heartbeat, or finishes ending.
_GRACE = 1.0

# The seconds that the last heartbeat may take on a disk that hangs.
_LAST_BEAT = 10.0

# The seconds that all locks may take before the process is ended.
_RELEASE_SECONDS = 2.0

# The tries to open the lock at once, when its last holder has just removed it.
_OPEN_TRIES = 3


def read_heartbeat(model_dir: str | os.PathLike[str], name: str = HEARTBEAT) -> Heartbeat | None:
    """Returns the heartbeat of the process that trains or trained in `model_dir`.

    Args:
      model_dir: The folder of the run.
      name: The name of the file. Another lock has another one.

    Returns:
      The heartbeat, or None if the file is missing or damaged.
    """
    try:
        path = Path(model_dir) / name
        content = path.read_bytes()
        heartbeat = files.parse_json(content)
    except (OSError, ValueError):
        return None
    if not isinstance(heartbeat, dict) or "ended" not in heartbeat:
        return None
    are_kinds_right = all(isinstance(heartbeat.get(key), kind) for key, kind in _KINDS.items())
    return cast("Heartbeat", heartbeat) if are_kinds_right else None


def is_process_alive(pid: int) -> bool:
    """Whether this machine has a process with this pid. True if that cannot be found out."""
    try:
        # Signal 0 only checks whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # Another user's process, or not a valid pid.
        return True
    return True


def check_not_in_use(model_dir: str | os.PathLike[str]) -> None:
    """Raises ModelDirInUseError when another process of this machine trains in `model_dir` now.

    This is an early check, which takes no lock. Only RunLock is sure.
    """
    lock = RunLock(model_dir)
    with contextlib.suppress(OSError):
        descriptor = os.open(Path(model_dir) / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise lock._build_in_use_error(read_heartbeat(model_dir)) from None
        finally:
            os.close(descriptor)


class RunLock:
    """While entered, this process is the only trainer in `model_dir`.

    It writes a heartbeat every `beat_seconds`.

    If the lock is free but the last heartbeat comes from another machine and has not ended, the
    heartbeat is watched for four beats: if it changes, a trainer lives there that flock does not
    show. The same happens if the file system has no flock, where two trainers that start at the
    same moment are not noticed.

    Only this process holds the lock: programs that it starts do not inherit it (O_CLOEXEC), and a
    forked child drops it. So no child that outlives the trainer keeps the lock.

    Args:
      model_dir: A local folder. It is made if it is missing.
      progress: Returns (phase, step). Called in a thread, where it may be slow or raise.
      host: The name of this machine. None means its host name.
      beat_seconds: The seconds between two heartbeats.
      record_path: The file without which there is nothing to resume. If an error ends the block
        before it exists, lock and heartbeat are removed, and the folder if it is then empty. None
        means that they always stay.
      names: The names of the lock file and of the heartbeat file.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        progress: Callable[[], tuple[str, int]] = lambda: ("start", 0),
        *,
        host: str | None = None,
        beat_seconds: float = 5.0,
        record_path: str | os.PathLike[str] | None = None,
        names: tuple[str, str] = (LOCK, HEARTBEAT),
    ) -> None:
        self._folder = Path(model_dir)
        self._lock_name, self._heartbeat_name = names
        self._write_lock = threading.Lock()
        self._host = host or socket.gethostname()
        self._seconds = beat_seconds
        self._record_path = record_path
        self._start_time = _now()
        self._end_state: EndState | None = None
        self._earlier: list[dict[str, Any]] = []
        self._has_failed = False
        self._descriptor = -1
        self._uses_flock = False
        self._stop_event = threading.Event()
        self._release_lock = threading.Lock()

        def read_progress() -> tuple[str, int]:
            phase, step = progress()
            return str(phase), int(step)

        self._reader = ProgressReader(read_progress, min(1.0, beat_seconds))
        self._thread = threading.Thread(
            target=self._refresh_until_stopped, name="heartbeat", daemon=True
        )

    @property
    def phase(self) -> str:
        """The last phase that `progress` returned, "start" at first."""
        return self._reader.latest[0]

    @property
    def step(self) -> int:
        """The last step that `progress` returned, 0 at first."""
        step = self._reader.latest[1]
        assert isinstance(step, int)
        return step

    def __enter__(self) -> RunLock:
        """Takes the lock.

        Raises:
          ModelDirInUseError: when another trainer holds it. This takes at most two seconds if that
            trainer is on this machine.
          StorageError: when the folder cannot be written.
        """
        self._descriptor = _open(self._folder / self._lock_name)
        _held_locks.add(self)
        try:
            self._claim()
            previous: Any = self._read_heartbeat()
            if previous is not None:
                earlier = previous.pop("earlier", ())
                self._earlier = [*earlier, previous]
            call_within(_GRACE, self._reader.read)
            self._write_heartbeat()
        except BaseException:
            self._close()
            raise

        self._reader.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        remove_files = error is not None and not self.is_recorded()
        self.release(get_end_state(error), remove_files=remove_files)

    def is_recorded(self) -> bool:
        """Whether there is something to resume, so that lock and heartbeat stay after an error."""
        return self._record_path is None or os.path.exists(self._record_path)

    def release(self, end_state: EndState, *, remove_files: bool = False) -> None:
        """Writes the last heartbeat, which says how the run ended, and releases the lock.

        Callable from any thread. A second call does nothing.

        Args:
          end_state: How the run ended.
          remove_files: Whether to remove lock and heartbeat first, and the folder if it is then
            empty. They stay if the file system has no locks, since they may already belong to
            another trainer.
        """
        with self._release_lock:
            if self._descriptor < 0:
                return

            # The thread writes the last heartbeat with the newest step, and ends.
            self._reader.stop()
            call_within(_GRACE, self._reader.read)
            self._end_state = end_state
            self._stop_event.set()
            self._thread.join(_LAST_BEAT)

            if remove_files and not self._thread.is_alive() and self._uses_flock:
                # Another trainer may have replaced the lock file.
                if _is_at(self._folder / self._lock_name, self._descriptor):
                    self._remove()
            self._close()

    def _read_heartbeat(self) -> Heartbeat | None:
        return read_heartbeat(self._folder, self._heartbeat_name)

    def _remove(self) -> None:
        # In this order: without the lock another trainer may come and write both.
        for name in (self._heartbeat_name, self._lock_name):
            with contextlib.suppress(OSError):
                os.remove(self._folder / name)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _claim(self) -> None:
        """Returns once the folder belongs to this process.

        It is then locked, and no heartbeat shows a trainer that the lock misses.
        """
        self._uses_flock = self._acquire_lock()
        heartbeat = self._read_heartbeat()
        if heartbeat is not None and not heartbeat["ended"]:
            owner = f"{heartbeat['host']} pid {heartbeat['pid']}"
            # The lock may miss a trainer on another machine, and any without flock.
            may_be_alive = not self._uses_flock or heartbeat["host"] != self._host
            if may_be_alive and not self._watch_for_silence(heartbeat, owner):
                return
            _LOG.warning(
                "the run of %s in this folder was cut off; this process takes it over", owner
            )

        # The files of trainers that were killed while they wrote.
        for path in self._folder.glob(f".{self._heartbeat_name}.*.tmp"):
            path.unlink(missing_ok=True)

    def _acquire_lock(self) -> bool:
        """Takes the lock, and returns whether the file system has locks."""
        deadline = time.monotonic() + _GRACE
        try:
            while not self._try_lock():
                # A new holder may not have written its heartbeat yet, and an ending one may be
                # about to release the lock.
                holder = self._read_heartbeat()
                is_holder_alive = (
                    holder is not None
                    and not holder["ended"]
                    and (holder["host"] != self._host or is_process_alive(holder["pid"]))
                )
                if is_holder_alive or time.monotonic() > deadline:
                    raise self._build_in_use_error(holder if is_holder_alive else None)
                time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise StorageError(
                    f"{self._folder / self._lock_name} cannot be locked: {error.strerror or error}"
                ) from error
            _LOG.warning(
                "%s: the file system has no locks (%s); only %s shows whether another trainer runs"
                " there, and two trainers that start at the same moment are not noticed",
                self._folder,
                error.strerror,
                self._heartbeat_name,
            )
            return False
        return True

    def _try_lock(self) -> bool:
        """Locks the file that has the name now, even if it was replaced.

        Returns False if another process holds the lock.
        """
        for _ in range(_OPEN_TRIES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            path = self._folder / self._lock_name
            if _is_at(path, self._descriptor):
                return True

            # The locked file was removed or replaced meanwhile.
            old_descriptor = self._descriptor
            self._descriptor = _open(path)
            os.close(old_descriptor)
        return False

    def _watch_for_silence(self, heartbeat: Heartbeat, owner: str) -> bool:
        """Watches a heartbeat for four beats.

        Returns True if it has stopped, False if its run ends meanwhile. Raises if it beats.
        """
        seconds = _BEATS_TO_WATCH * self._seconds
        _LOG.warning(
            "%s was in use by %s; watching for %g s whether it is still in use",
            self._folder,
            owner,
            seconds,
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._seconds / 10)
            current = self._read_heartbeat()
            if current is not None and current["ended"]:
                return False
            if current is not None and current["beat"] != heartbeat["beat"]:
                raise self._build_in_use_error(current)
        return True

    def _build_in_use_error(self, holder: Heartbeat | None) -> ModelDirInUseError:
        if holder is None:
            return ModelDirInUseError(
                f"{self._folder} is in use by another trainer, which {HEARTBEAT} does not name;"
                f" `fuser -v {self._folder / LOCK}` shows its pid; wait until it ends, stop it,"
                " or give another model_dir"
            )
        host = holder["host"]
        pid = holder["pid"]
        return ModelDirInUseError(
            f"{self._folder} is in use: {host} pid {pid} has trained there since"
            f" {holder['started']} (step {holder['step']} at its last heartbeat); wait until it"
            f" ends, stop it (`kill {pid}` on {host}), or give another model_dir"
        )

    def _refresh_until_stopped(self) -> None:
        while not self._stop_event.wait(self._seconds):
            self.refresh_heartbeat()
        self.refresh_heartbeat()

    def refresh_heartbeat(self) -> None:
        """Writes the heartbeat now. Its first error is logged."""
        if not (self._folder / self._lock_name).exists():
            # Somebody has moved the folder, and the heartbeat would make it again.
            return
        try:
            self._write_heartbeat()
        except StorageError as error:
            if not self._has_failed:
                _LOG.warning(
                    "the heartbeat cannot be written, so others cannot see that this run is"
                    " alive: %s",
                    error,
                )
            self._has_failed = True

    def _write_heartbeat(self) -> None:
        path = self._folder / self._heartbeat_name
        with self._write_lock:
            files.write_json(path, self._entries(), point="heartbeat")

    def _entries(self) -> Mapping[str, object]:
        return {
            "host": self._host,
            "pid": os.getpid(),
            "started": self._start_time,
            "step": self.step,
            "phase": self.phase,
            "beat": _now(),
            "ended": self._end_state,
            "earlier": self._earlier,
        }

    def _close(self) -> None:
        _held_locks.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1


_held_locks: set[RunLock] = set()


def release_all_locks() -> None:
    """Releases all locks of this process, which a signal is about to end.

    Locks of runs that are not recorded are removed with their heartbeats. Callable from any thread.
    Returns within two seconds.
    """

    def release() -> None:
        for lock in list(_held_locks):
            lock.release("stopped", remove_files=not lock.is_recorded())

    call_within(_RELEASE_SECONDS, release)


def _drop_in_child() -> None:
    # Closing keeps the parent's lock: it lasts as long as any descriptor of the same open file.
    for lock in list(_held_locks):
        lock._close()


os.register_at_fork(after_in_child=_drop_in_child)


def _open(path: Path, times: int = _OPEN_TRIES) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(path, flags, 0o666)
    except OSError as error:
        if times > 1 and error.errno in (errno.ENOENT, errno.EEXIST):
            # The last trainer may have just removed the folder.
            return _open(path, times - 1)
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; give a model_dir that this user"
            " can write to"
        ) from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def get_end_state(error: BaseException | None) -> EndState:
    """Returns how a run ended that `error` has left. None: it ended without an error."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done"
    if isinstance(error, SystemExit):
        return "stopped" if error.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED) else "failed"
    if isinstance(error, (PreemptedError, InterruptedRunError, KeyboardInterrupt)):
        return "stopped"
    return "failed"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
