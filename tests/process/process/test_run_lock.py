"""Who may train in a folder: real processes that end, are killed, or live on another machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.builders import wait_until
from trainer_kit import files
from trainer_kit.errors import (
    ExitCode,
    InterruptedRunError,
    ModelDirInUseError,
    PreemptedError,
    StorageError,
    UsageError,
)
from trainer_kit.process import run_lock
from trainer_kit.process.run_lock import RunLock, check_not_in_use, read_heartbeat
from trainer_kit.testing import stop_at

_PROGRAM = """
import logging, os, subprocess, sys, time
from trainer_kit.errors import TrainerKitError
from trainer_kit.process.run_lock import RunLock

logging.basicConfig(level=logging.WARNING, format="%(message)s")
folder, step, seconds = sys.argv[1:4]
start = time.monotonic()
try:
    with RunLock(folder, lambda: ("train", int(step)), host="here", beat_seconds=float(seconds)):
        if "with children" in sys.argv:
            program = subprocess.Popen(["sleep", "60"], close_fds=False)
            fork = os.fork() or time.sleep(60) or os._exit(0)
            print(program.pid, fork, flush=True)
        print("training", flush=True)
        sys.stdin.readline()
except TrainerKitError as error:
    print(error, file=sys.stderr)
    print(time.monotonic() - start)
    sys.exit(error.exit_code)
"""
_RECORD = {
    "host": "there",
    "pid": 4321,
    "started": "2025-01-01T10:00:00+00:00",
    "step": 70,
    "phase": "train",
    "beat": "2025-01-01T11:00:00+00:00",
    "ended": None,
}


class _Trainer:
    """A process that trains in `folder` until it is told to end or killed."""

    def __init__(
        self, folder: Path, step: int = 120, *, seconds: float = 60, children: bool = False
    ) -> None:
        self.children: list[int] = []
        command = [sys.executable, "-c", _PROGRAM, str(folder), str(step), str(seconds)]
        if children:
            command.append("with children")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def trains(self) -> bool:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line[:1].isdigit() and " " in line:
            self.children = [int(pid) for pid in line.split()]
            line = self.process.stdout.readline()
        return line == "training\n"

    def kill(self) -> str:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stderr is not None
        return "" if self.children else self.process.stderr.read()

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate("end\n", timeout=20)
        return self.process.returncode, text

    def read_refusal(self) -> tuple[str, float]:
        """Returns the message and the seconds it took."""
        output, text = self.process.communicate(timeout=20)
        assert self.process.returncode == 4, text
        return text.strip(), float(output)


@pytest.fixture
def start() -> Iterator[Callable[..., _Trainer]]:
    trainers: list[_Trainer] = []

    def start_trainer(*arguments: Any, **options: Any) -> _Trainer:
        trainer = _Trainer(*arguments, **options)
        trainers.append(trainer)
        return trainer

    yield start_trainer
    for trainer in trainers:
        for pid in trainer.children:
            os.kill(pid, signal.SIGKILL)
        trainer.process.kill()
        trainer.process.wait(20)
        for stream in (trainer.process.stdin, trainer.process.stdout, trainer.process.stderr):
            assert stream is not None
            stream.close()


def _write_heartbeat(folder: Path, **changes: object) -> None:
    files.write_json(folder / "heartbeat.json", {**_RECORD, **changes})


def _read_heartbeat(folder: Path) -> dict[str, Any]:
    heartbeat = read_heartbeat(folder)
    assert heartbeat is not None
    return heartbeat


def test_the_second_of_two_trainers_is_refused_at_once(
    tmp_path: Path, start: Callable[..., _Trainer]
) -> None:
    first = start(tmp_path / "run")
    assert first.trains()
    before = _read_heartbeat(tmp_path / "run")

    message, seconds = start(tmp_path / "run").read_refusal()

    assert seconds < 2
    assert message == (
        f"{tmp_path}/run is in use: here pid {first.pid} has trained there since"
        f" {before['started']} (step 120 at its last heartbeat); wait until it ends, stop it"
        f" (`kill {first.pid}` on here), or give another model_dir"
    )
    assert _read_heartbeat(tmp_path / "run") == before
    assert first.end() == (0, "")
    assert _read_heartbeat(tmp_path / "run")["ended"] == "done"


def test_a_holder_without_a_sound_heartbeat_counts_as_in_use(
    tmp_path: Path, start: Callable[..., _Trainer]
) -> None:
    first = start(tmp_path)
    assert first.trains()
    path = tmp_path / "heartbeat.json"
    dead = subprocess.Popen(["true"])
    dead.wait()
    heartbeat_of_dead = json.dumps({**_RECORD, "host": "here", "pid": dead.pid})

    for text in ('{"host": "here", "pi', heartbeat_of_dead):
        path.write_text(text)
        message, seconds = start(tmp_path).read_refusal()
        assert seconds < 2
        assert "in use by another trainer" in message
        assert f"fuser -v {tmp_path}/trainer.lock" in message
        assert f"pid {dead.pid}" not in message
    assert first.end() == (0, "")


def test_after_kill_9_the_next_takes_over_each_time(
    tmp_path: Path, start: Callable[..., _Trainer]
) -> None:
    dead = None
    for step in range(3):
        trainer = start(tmp_path, step, seconds=0.001)  # so that it is killed while it writes
        assert trainer.trains()
        assert _read_heartbeat(tmp_path)["pid"] == trainer.pid
        text = trainer.kill()
        takeover = f"the run of here pid {dead} in this folder was cut off; this process takes it"
        assert text == ("" if dead is None else f"{takeover} over\n")
        dead = trainer.pid

    (tmp_path / ".heartbeat.json.4321.tmp").write_text('{"host": "he')
    assert start(tmp_path).trains()
    assert sorted(os.listdir(tmp_path)) == ["heartbeat.json", "trainer.lock"]


def test_children_that_outlive_the_trainer_do_not_keep_the_lock(
    tmp_path: Path, start: Callable[..., _Trainer]
) -> None:
    first = start(tmp_path, children=True)
    assert first.trains()
    assert len(first.children) == 2

    start(tmp_path).read_refusal()
    first.kill()
    for pid in first.children:
        os.kill(pid, 0)

    assert start(tmp_path).trains()


@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_a_forked_child_that_leaves_the_block_ends_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    pid = os.getpid()
    try:
        with contextlib.suppress(ValueError), RunLock(tmp_path, record_path="missing"):
            child = os.fork()
            if child == 0:
                raise error
            os.waitpid(child, 0)
            assert sorted(os.listdir(tmp_path)) == ["heartbeat.json", "trainer.lock"]
            assert _read_heartbeat(tmp_path)["ended"] is None
            with pytest.raises(ModelDirInUseError):
                RunLock(tmp_path).__enter__()
    finally:
        if os.getpid() != pid:
            os._exit(0)


def test_a_trainer_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    _write_heartbeat(tmp_path, ended="done")
    descriptor = os.open(tmp_path / "trainer.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    timer = threading.Timer(0.2, os.close, [descriptor])
    timer.start()
    with RunLock(tmp_path):
        timer.join()
        assert _read_heartbeat(tmp_path)["pid"] == os.getpid()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Starts a trainer on another machine: it beats, and its lock is not seen here."""
    stopped = threading.Event()
    _write_heartbeat(tmp_path)

    def beat() -> None:
        count = 0
        while not stopped.wait(0.02):
            count += 1
            _write_heartbeat(tmp_path, step=70 + count, beat=f"beat {count}")

    thread = threading.Thread(target=beat)
    yield thread.start
    stopped.set()
    if thread.ident is not None:
        thread.join()


def test_a_trainer_that_beats_on_another_machine_is_in_use(
    tmp_path: Path, elsewhere: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere()

    message = r"there pid 4321 has trained .* \(step \d+ at its last heartbeat\); "
    for _ in range(2):  # the first attempt has given the lock back
        with pytest.raises(ModelDirInUseError, match=message) as error:
            RunLock(tmp_path, host="here", beat_seconds=5).__enter__()
        assert error.value.exit_code == ExitCode.MODEL_DIR_IN_USE

    assert "watching for 20 s" in caplog.text
    assert "cut off" not in caplog.text
    assert _read_heartbeat(tmp_path)["host"] == "there"


def test_a_silent_trainer_on_another_machine_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_heartbeat(tmp_path, beat="2999-01-01T00:00:00+00:00")  # its clock tells nothing

    begin = time.monotonic()
    with RunLock(tmp_path, host="here", beat_seconds=0.1):
        assert time.monotonic() - begin >= 0.4
        assert _read_heartbeat(tmp_path)["host"] == "here"

    _, takeover = caplog.messages
    message = "the run of there pid 4321 in this folder was cut off; this process takes it over"
    assert takeover == message


def test_a_trainer_elsewhere_that_ends_is_followed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_heartbeat(tmp_path)
    timer = threading.Timer(0.1, _write_heartbeat, [tmp_path], {"ended": "stopped"})
    timer.start()
    begin = time.monotonic()
    with RunLock(tmp_path, host="here", beat_seconds=5):
        assert time.monotonic() - begin < 20
        assert _read_heartbeat(tmp_path)["host"] == "here"

    assert "cut off" not in caplog.text


@pytest.mark.parametrize("host", ["here", "there"])
@pytest.mark.parametrize("ended", ["done", "stopped", "failed"])
def test_a_run_that_has_ended_is_followed_without_a_word(
    tmp_path: Path, host: str, ended: str, caplog: pytest.LogCaptureFixture
) -> None:
    _write_heartbeat(tmp_path, host=host, ended=ended)
    with RunLock(tmp_path, host="here", beat_seconds=60):
        assert _read_heartbeat(tmp_path)["ended"] is None
    assert caplog.text == ""


@pytest.fixture(params=[errno.ENOLCK, errno.ENOTSUP])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_heartbeat_decides_with_a_warning(
    tmp_path: Path, elsewhere: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(tmp_path, host="there", beat_seconds=0.05):  # even on the same machine
        pass
    assert "has no locks" in caplog.text
    assert "the run of there pid 4321 in this folder was cut off" in caplog.text

    _write_heartbeat(tmp_path)
    elsewhere()
    with pytest.raises(ModelDirInUseError, match="there pid 4321"):
        RunLock(tmp_path, host="there", beat_seconds=5).__enter__()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_is_removed_that_may_be_anothers(tmp_path: Path) -> None:
    with pytest.raises(ValueError), RunLock(tmp_path, record_path="missing"):
        raise ValueError("bug")
    assert (tmp_path / "trainer.lock").exists()
    assert _read_heartbeat(tmp_path)["ended"] == "failed"


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, "done"),
        (SystemExit(0), "done"),
        (SystemExit(1), "failed"),
        (SystemExit("what went wrong"), "failed"),
        (SystemExit(75), "stopped"),
        (SystemExit(ExitCode.INTERRUPTED), "stopped"),
        (ValueError("bug"), "failed"),
        (StorageError("full"), "failed"),
        (KeyboardInterrupt(), "stopped"),
        (PreemptedError("SIGTERM"), "stopped"),
        (InterruptedRunError("Ctrl-C"), "stopped"),
    ],
)
def test_the_last_heartbeat_tells_how_the_run_has_ended(
    tmp_path: Path, error: BaseException | None, ended: str
) -> None:
    progress = ("train", 1)
    try:
        with RunLock(tmp_path, lambda: progress, beat_seconds=60):
            progress = ("save", 2)
            if error is not None:
                raise error
    except BaseException as raised_error:
        assert raised_error is error

    heartbeat = _read_heartbeat(tmp_path)
    assert (heartbeat["phase"], heartbeat["step"], heartbeat["ended"]) == ("save", 2, ended)
    with RunLock(tmp_path):  # it has been given back
        pass


@pytest.mark.parametrize(
    "error", [ValueError("bug"), UsageError("mistake"), KeyboardInterrupt(), SystemExit(75)]
)
@pytest.mark.parametrize("users_files", [[], ["notes.txt"]])
def test_a_run_that_is_not_recorded_leaves_no_trace_of_its_end(
    tmp_path: Path, error: BaseException, users_files: list[str]
) -> None:
    for name in users_files:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).write_text("the user's")
    with pytest.raises(type(error)), RunLock(tmp_path / "run", record_path="missing"):
        raise error
    assert (tmp_path / "run").exists() == bool(users_files)
    assert [path.name for path in (tmp_path / "run").glob("*")] == users_files


def test_a_waiter_whose_lock_file_is_removed_is_still_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = str(folder / "trainer.lock")
    entered = threading.Event()
    leave = threading.Event()

    def train() -> None:
        with RunLock(folder):
            entered.set()
            leave.wait(20)

    def both_have_opened_the_lock() -> bool:
        paths = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return paths.count(lock) == 2

    second = threading.Thread(target=train)
    with pytest.raises(ValueError), RunLock(folder, record_path="missing"):
        # With a heartbeat the second trainer would know who trains, and not wait.
        (folder / "heartbeat.json").unlink()
        second.start()
        wait_until(both_have_opened_the_lock)
        raise ValueError("bug")

    assert entered.wait(20)
    try:
        with pytest.raises(ModelDirInUseError):
            RunLock(folder).__enter__()
    finally:
        leave.set()
        second.join()


def test_no_two_of_many_short_runs_train_at_the_same_time(tmp_path: Path) -> None:
    running = 0
    most_running = 0
    runs = 0
    errors: list[Exception] = []

    def train_briefly() -> None:
        nonlocal running, most_running, runs
        for _ in range(40):
            try:
                with RunLock(tmp_path / "run", record_path="missing"):
                    runs += 1
                    running += 1
                    most_running = max(most_running, running)
                    time.sleep(0.001)
                    running -= 1
                    raise ValueError("bug")
            except ValueError:
                pass
            except ModelDirInUseError:
                time.sleep(0.001)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=train_briefly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most_running == 1
    assert errors == []
    assert runs > 4
    assert not (tmp_path / "run").exists()


def test_a_release_by_hand_has_the_last_word(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.release("stopped")
        with RunLock(tmp_path, host="other"):
            pass
    heartbeat = _read_heartbeat(tmp_path)

    assert heartbeat["host"] == "other"
    assert heartbeat["ended"] == "done"


def test_a_heartbeat_tells_who_where_and_since_when_in_utc(tmp_path: Path) -> None:
    step = 0
    with RunLock(tmp_path, lambda: ("train", step), host="here", beat_seconds=0.01) as lock:
        first = _read_heartbeat(tmp_path)
        step = 5
        wait_until(lambda: _read_heartbeat(tmp_path)["step"] == 5)
        assert (lock.phase, lock.step) == ("train", 5)
        later = _read_heartbeat(tmp_path)

    assert list(first) == ["host", "pid", "started", "step", "phase", "beat", "ended", "earlier"]
    assert (first["host"], first["pid"], first["ended"]) == ("here", os.getpid(), None)
    assert first["started"] == later["started"]
    assert first["beat"] != later["beat"]
    for text in (first["started"], first["beat"]):
        assert datetime.fromisoformat(text).utcoffset() == timedelta(0)


def test_a_heartbeat_keeps_those_of_earlier_processes(tmp_path: Path) -> None:
    heartbeats = []
    for _ in range(3):
        with RunLock(tmp_path):
            heartbeats.append(_read_heartbeat(tmp_path))

    first, second = heartbeats[2]["earlier"]
    assert (first["started"], first["ended"]) == (heartbeats[0]["started"], "done")
    assert (second["started"], second["ended"]) == (heartbeats[1]["started"], "done")
    assert heartbeats[0]["earlier"] == []


def test_a_progress_that_raises_or_hangs_does_not_stop_the_heart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    answers: list[Callable[[], Any]] = [
        lambda: ("train", 1),
        lambda: 1 / 0,
        lambda: ("train", "x"),
        sys.exit,
    ]

    def read_progress() -> Any:
        return answers.pop(0)() if answers else never.wait(20)

    with RunLock(tmp_path, read_progress, beat_seconds=0.01) as lock:
        wait_until(lambda: not answers)
        beat = _read_heartbeat(tmp_path)["beat"]
        wait_until(lambda: _read_heartbeat(tmp_path)["beat"] != beat)
        assert (lock.phase, lock.step) == ("train", 1)
        never.set()

    message = "the progress of the run cannot be read: ZeroDivisionError('division by zero')"
    assert caplog.messages == [message]


def test_a_full_disk_costs_one_warning_and_beats_resume_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed_paths: list[str] = []

    def fail(point: str, path: str) -> None:
        if point == "heartbeat.flush":
            failed_paths.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunLock(tmp_path, beat_seconds=0.01):
        monkeypatch.setattr(files, "on_write_point", fail)
        wait_until(lambda: len(failed_paths) > 3)
        beat = _read_heartbeat(tmp_path)["beat"]
        monkeypatch.undo()
        wait_until(lambda: _read_heartbeat(tmp_path)["beat"] != beat)

    assert caplog.messages == [
        "the heartbeat cannot be written, so others cannot see that this run is alive: "
        f"{tmp_path}/heartbeat.json cannot be written: No space left on device"
    ]


@pytest.mark.parametrize("folder", ["/proc/run", "{}/file", "{}/file/run"])
def test_a_folder_that_cannot_be_written_is_storage(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    message = r"trainer\.lock cannot be written: .*; give a model_dir"
    with pytest.raises(StorageError, match=message):
        RunLock(folder.format(tmp_path)).__enter__()


def test_a_disk_full_at_the_start_fails_and_frees_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "on_write_point", None)  # the patch puts it back at the end
    stop_at("heartbeat.flush", how="raise")

    with pytest.raises(StorageError, match="No space left"):
        RunLock(tmp_path).__enter__()

    with RunLock(tmp_path):
        pass


def test_a_heartbeat_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path) is None
    assert read_heartbeat(str(tmp_path / "missing")) is None

    _write_heartbeat(tmp_path)
    assert read_heartbeat(tmp_path) == _RECORD

    whole = (tmp_path / "heartbeat.json").read_bytes()
    for cut in (
        b"",
        whole[:40],
        b"[]",
        b'{"host": "here"}',
        b"\xff\xfe",
        whole.replace(b"4321", b"null"),
    ):
        (tmp_path / "heartbeat.json").write_bytes(cut)
        assert read_heartbeat(tmp_path) is None


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer_kit")


def test_a_look_finds_a_live_trainer_and_takes_nothing(tmp_path: Path) -> None:
    check_not_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []

    message = rf"pid {os.getpid()} .*step 7 at its last heartbeat"
    with RunLock(tmp_path, lambda: ("train", 7)), pytest.raises(ModelDirInUseError, match=message):
        check_not_in_use(tmp_path)

    check_not_in_use(tmp_path)
    with RunLock(tmp_path):
        pass
