"""Stalls in real processes: what is said, what is written, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders import start_python, wait_until
from trainer_kit.process.watchdog import ProgressReader, Watchdog, call_within

_PROGRAM = """
import ctypes, logging, os, re, signal, sys, threading, time
from trainer_kit.process.watchdog import Watchdog

logging.basicConfig(level=logging.WARNING, format="%(message)s")
here = ["start", 0]

def watch(**options):
    arguments = {"timeout_seconds": 0.8, "warn_after_seconds": 0.3, "poll_seconds": 0.05, **options}
    return Watchdog(lambda: tuple(here), sys.argv[1], **arguments)

def sleeping_source():
    time.sleep(60)

def two_locks():
    with (lock := threading.Lock()):
        lock.acquire()

def native_call():
    ctypes.CDLL(None).sleep(60)

def native_call_with_the_global_lock():
    ctypes.PyDLL(None).sleep(60)

"""
_IMPATIENT = "import trainer_kit.process.watchdog\ntrainer_kit.process.watchdog._PATIENCE = 0.3\n"


def _run(folder: Path, text: str, *, seconds: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM + text, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def _run_together(folders: list[Path], texts: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Runs programs at once, each with its folder: most of each is a wait."""
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(_run, folders, texts))


def test_a_stall_ends_with_7_after_a_warning_and_writes_stacks(tmp_path: Path) -> None:
    stalls = {"train": "sleeping_source", "eval": "two_locks", "save": "native_call"}
    start = time.monotonic()
    texts = [
        f"here[:] = [{phase!r}, 120]\nwith watch():\n    {stall}()\n"
        for phase, stall in stalls.items()
    ]
    runs = _run_together([tmp_path / phase for phase in stalls], texts)

    assert time.monotonic() - start < 1 + 5
    for (phase, stall), done in zip(stalls.items(), runs, strict=True):
        assert done.returncode == 7
        warning, error = done.stderr.splitlines()
        assert warning == (
            f"no progress for 0.3 s in phase '{phase}' (step 120); "
            "the process ends with exit code 7 after 0.8 s (trainer.hang_timeout_seconds)"
        )
        (stacks,) = (tmp_path / phase).iterdir()
        assert re.fullmatch(r"stacks-\d{8}T\d{6}\.\d{6}Z\.txt", stacks.name)
        assert f"in phase '{phase}' (step 120); the process ends with exit code 7" in error
        assert str(stacks) in error
        text = stacks.read_text()
        assert f"in {stall}\n" in text
        assert "is MainThread" in text
        assert "in _watch\n" in text


def test_a_stall_with_the_global_lock_ends_with_1_and_stacks(tmp_path: Path) -> None:
    done = _run(
        tmp_path, "with watch(last_resort_seconds=0.5):\n    native_call_with_the_global_lock()\n"
    )
    assert done.returncode == 1
    assert "in native_call_with_the_global_lock\n" in done.stderr


def test_progress_puts_the_end_off(tmp_path: Path) -> None:
    text = """
with watch(timeout_seconds=0.6, warn_after_seconds=30):
    for here[1] in range(12):
        time.sleep(0.1)
print("trained")
"""
    done = _run(tmp_path, text)

    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert list(tmp_path.iterdir()) == []


def test_the_end_comes_without_a_place_for_stacks_disk_or_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hanging = """
from trainer_kit import files
files.on_write_point = lambda point, path: time.sleep(60)
logging.getLogger().handlers[0].acquire()
"""
    stall = "with watch():\n    native_call()\n"

    without_place, without_disk = _run_together(
        [tmp_path / "file", tmp_path], [stall, _IMPATIENT + hanging + stall]
    )

    for done in (without_place, without_disk):
        assert done.returncode == 7
        assert "in native_call\n" in done.stderr
    assert "cannot be written" in without_place.stderr
    assert "error: no progress" in without_disk.stderr


def test_a_progress_that_hangs_or_always_raises_is_no_progress(tmp_path: Path) -> None:
    progresses = ("lambda: time.sleep(60)", "lambda: 1 / 0", "sys.exit")
    texts = [
        f"with Watchdog({progress}, sys.argv[1], 0.8, 0.3, 0.05):\n    native_call()\n"
        for progress in progresses
    ]

    runs = _run_together([tmp_path] * 3, texts)

    for progress, done in zip(progresses, runs, strict=True):
        assert done.returncode == 7
        assert "no progress for 0.3 s in phase 'start' (step 0)" in done.stderr
        assert done.stderr.count("cannot be read: ZeroDivisionError") == ("1 / 0" in progress)


def test_a_process_stopped_for_longer_than_the_timeout_lives(tmp_path: Path) -> None:
    text = """
with watch(timeout_seconds=1.5, warn_after_seconds=30):
    print("ready", flush=True)
    sys.stdin.readline()
    time.sleep(0.3)
print("left")
"""
    process = start_python("-c", _PROGRAM + text, str(tmp_path))
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)

    assert process.communicate("go on\n", timeout=20)[0] == "left\n"
    assert process.returncode == 0


def test_a_forked_child_ends_as_without_a_watchdog(tmp_path: Path) -> None:
    text = """
with watch(timeout_seconds=20):
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        sys.exit(5)
    signal.alarm(10)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = _run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


def test_leaving_cancels_the_thread_and_the_last_resort(tmp_path: Path) -> None:
    text = """
with watch(timeout_seconds=0.4, last_resort_seconds=0.1, warn_after_seconds=30):
    pass
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
time.sleep(1)
print("alive")
"""
    done = _run(tmp_path, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_without_a_timeout_each_stall_gets_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = 1
    exits: list[int] = []
    with Watchdog(lambda: ("train", step), tmp_path, None, 0.05, 0.01, exit=exits.append):
        for count in (1, 3):
            wait_until(lambda count=count: len(caplog.messages) >= count)
            step += 1
            wait_until(lambda count=count: len(caplog.messages) > count)
    warning = "no progress for 0.05 s in phase 'train' (step {}); the process is never ended for it"
    again = r"progress again after \d+ s in phase 'train' \(step {}\)"

    for step, (stall, end) in enumerate([caplog.messages[0:2], caplog.messages[2:4]], start=1):
        assert stall.startswith(warning.format(step))
        assert re.fullmatch(again.format(step + 1), end)
    assert exits == []
    assert os.listdir(tmp_path) == []


def test_a_stall_is_not_warned_of_again_while_it_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    readings = threading.Semaphore(0)

    def read_progress() -> tuple[str, object]:
        readings.release()
        return "train", 1

    with Watchdog(read_progress, tmp_path, None, 0.02, 0.01):
        wait_until(lambda: caplog.messages)
        for _ in range(20):
            assert readings.acquire(timeout=20)
    assert len(caplog.messages) == 1


def test_a_change_of_phase_alone_is_progress() -> None:
    answers = iter([("train", 1), ("train", 1), ("eval", 1), ("train", 1)])
    reader = ProgressReader(lambda: next(answers), 1)
    changes = []
    for _ in range(4):
        reader.read()
        changes.append(reader.changes)

    assert changes == [1, 1, 2, 3]


def test_a_token_that_cannot_be_compared_is_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    reader = ProgressReader(lambda: ("train", Array()), 1)
    reader.read()
    reader.read()
    assert reader.changes == 1
    (message,) = caplog.messages
    assert "ambiguous" in message


def test_a_bounded_call_tells_whether_it_came_back_whole(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    assert call_within(20, lambda: None)
    assert not call_within(20, lambda: 1 / 0)
    assert "ZeroDivisionError" in caplog.messages[0]
    assert not call_within(0.05, lambda: never.wait(20))

    never.set()
