"""Real processes: what they print, how signals reach them, and that nothing of them is left."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.run.supervisor import child_process
from trainer_kit.run.supervisor.child_process import LINES_KEPT, Wakeups, run

# A grandchild that SIGTERM does not end, with a lock that lasts as long as it does.
_STUBBORN = """
import fcntl, signal, subprocess, sys, time
if sys.argv[1:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = open(sys.argv[1], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(60)
"""
# Runs a command, which follows its grace in seconds, and returns its exit code.
_SUPERVISOR = """
import sys
from trainer_kit.run.supervisor.child_process import Wakeups, run

with Wakeups() as wakeups:
    code = run(sys.argv[2:], wakeups, float(sys.argv[1]))[0]
sys.exit(code)
"""


def _child(*lines: str) -> list[str]:
    return [sys.executable, "-S", "-c", "\n".join(("import os, signal, subprocess, sys, time", *lines))]


def _with_grandchild(lock: Path, *lines: str) -> list[str]:
    """A child that starts the stubborn grandchild, waits for its lock, and goes on with `lines`."""
    return _child(
        f"made = subprocess.Popen([sys.executable, '-S', '-c', {_STUBBORN!r}, {str(lock)!r}], stdout=subprocess.PIPE)",
        "made.stdout.readline()",
        *lines,
    )


@pytest.fixture
def wakeups() -> Iterator[Wakeups]:
    """Signals of this process, in the hands of what is tested."""
    with Wakeups() as wakeups:
        yield wakeups


def _is_free(lock: Path) -> bool:
    with open(lock) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_output_is_copied_unchanged_and_its_last_lines_kept(
    wakeups: Wakeups, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out, err = b"".join(b"%d\xff\r\n" % line for line in range(50)), b"no newline \x00 at the end"
    code, lines = run(_child(f"os.write(1, {out!r})", f"os.write(2, {err!r})", "sys.exit(9)"), wakeups, 5.0)
    assert code == 9
    assert capfdbinary.readouterr() == (out, err)
    of_out = [line for line in lines if line != "no newline \x00 at the end"]  # which may come before them
    assert len(lines) == LINES_KEPT and len(of_out) >= LINES_KEPT - 1
    assert of_out == [f"{line}\ufffd" for line in range(50)][-len(of_out) :]


def test_the_end_of_overwritten_and_long_lines_is_kept(wakeups: Wakeups) -> None:
    lines = run(_child("print('10 %\\r20 %\\r30 %')", "print('x' * 100_000 + 'end')"), wakeups, 5.0)[1]
    assert lines[0] == "30 %"
    assert lines[1].endswith("xend") and len(lines[1]) == 2000


def test_the_input_is_empty_whatever_ours_is() -> None:
    command = [sys.executable, "-c", _SUPERVISOR, "5.0", *_child("sys.exit(3 + len(sys.stdin.read()))")]
    assert subprocess.run(command, input=b"for us").returncode == 3


def test_a_signal_that_ends_it_is_told_as_a_negative_code(wakeups: Wakeups) -> None:
    assert run(_child("os.kill(os.getpid(), signal.SIGKILL)"), wakeups, 5.0)[0] == -9


def test_left_processes_that_ignore_sigterm_are_ended(wakeups: Wakeups, tmp_path: Path) -> None:
    assert run(_with_grandchild(tmp_path / "lock", "sys.exit(1)"), wakeups, 0.2)[0] == 1
    assert _is_free(tmp_path / "lock")


def test_a_program_that_left_the_group_does_not_hold_up_the_end(
    wakeups: Wakeups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_LEFTOVER_SECONDS", 0.2)
    lines = run(
        _child(
            "away = subprocess.Popen(['sleep', '600'], start_new_session=True, stderr=subprocess.DEVNULL)",
            "print(away.pid)",
        ),
        wakeups,
        0.2,
    )[1]
    away = int(lines[0])
    assert os.getsid(away) == away  # it lives, in a session of its own
    os.kill(away, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_is_passed_on_and_remembered(wakeups: Wakeups, number: signal.Signals) -> None:
    # The child has the signal sent to us, when it is ready for it.
    code, lines = run(
        _child(
            f"signal.signal({int(number)}, lambda *_: sys.exit(75))",
            f"os.kill(os.getppid(), {int(number)})",
            "time.sleep(60)",
        ),
        wakeups,
        60.0,
    )
    assert (code, lines) == (75, [])
    assert wakeups.stop is number


def test_after_the_grace_time_the_whole_group_is_killed(wakeups: Wakeups, tmp_path: Path) -> None:
    command = _with_grandchild(
        tmp_path / "lock",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "os.kill(os.getppid(), signal.SIGTERM)",
        "time.sleep(60)",
    )
    assert run(command, wakeups, 0.2)[0] == -9
    assert _is_free(tmp_path / "lock")


def test_signals_are_passed_on_while_nobody_reads_our_output(tmp_path: Path) -> None:
    stuck = _child(
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / 'told')!r}, 'w'), os._exit(75)))",
        "os.write(2, b'ready')",
        "while True: os.write(1, bytes(1 << 16))",
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, "60.0", *stuck],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert supervisor.stdout is not None and supervisor.stderr is not None
    assert supervisor.stderr.read(5) == b"ready"
    supervisor.send_signal(signal.SIGTERM)
    give_up = time.monotonic() + 20
    while not (tmp_path / "told").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    supervisor.stdout.read()  # now somebody reads, and it can end
    assert supervisor.wait(20) == 75
    assert (tmp_path / "told").exists()


def test_when_the_supervisor_is_killed_all_that_it_started_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    command = _with_grandchild(tmp_path / "lock", f"alive = open({str(tmp_path / 'alive')!r}, 'w')", "time.sleep(60)")
    supervisor = subprocess.Popen([sys.executable, "-c", _SUPERVISOR, "1.0", *command])
    # A fifo ends for its reader when the last writer, here the child, is gone.
    with open(tmp_path / "alive", "rb") as alive:
        assert not _is_free(tmp_path / "lock")
        supervisor.kill()
        supervisor.wait(20)
        assert select.select([alive], [], [], 20)[0] and alive.read() == b""
    give_up = time.monotonic() + 20
    while not _is_free(tmp_path / "lock") and time.monotonic() < give_up:
        time.sleep(0.01)
    assert _is_free(tmp_path / "lock")


def test_a_program_that_is_not_there_is_told(wakeups: Wakeups) -> None:
    with pytest.raises(UsageError, match=r"'no-such-program' cannot be started: No such file or directory"):
        run(["no-such-program", "--flag"], wakeups, 1.0)


def test_handlers_and_the_wakeup_descriptor_are_put_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with Wakeups() as wakeups:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        wakeups.pause(600)
        assert wakeups.stop == signal.SIGTERM  # in whatever order they came
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_pause_lasts_its_time_although_processes_end(wakeups: Wakeups) -> None:
    begun = time.monotonic()
    process = subprocess.Popen(["true"])
    wakeups.pause(0.1)
    assert time.monotonic() - begun >= 0.1
    assert wakeups.stop is None
    process.wait()


def test_outside_the_main_thread_it_is_refused() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            with Wakeups():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
