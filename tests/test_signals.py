"""Signals, in real processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer_kit.signals import StopSignals

_LATE = """
import signal, sys, time
from trainer_kit.signals import StopSignals
_, grace, work, saves = sys.argv
def save():
    print("late", flush=True)
    return saves == "saves"
with StopSignals(lambda: None, float(grace), save) as signals:
    print("ready", flush=True)
    while signals.received is None:
        time.sleep(0.01)
    time.sleep(float(work))
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("work", "saves", "code", "output", "seconds"),
    [
        (0.1, "cannot", 0, "done\n", (0.1, 1.0)),
        (1.3, "cannot", 0, "late\ndone\n", (1.3, 2.0)),  # the second half of the grace time is the main thread's too
        (9.0, "cannot", 75, "late\n", (1.9, 3.0)),
        (9.0, "saves", 75, "late\n", (1.4, 1.9)),  # nothing to wait for any more
    ],
)
def test_all_of_the_grace_time_is_given_unless_all_is_saved(
    work: float, saves: str, code: int, output: str, seconds: tuple[float, float]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LATE, "2", str(work), saves],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate(timeout=20)
    assert (process.returncode, told) == (code, output), errors
    assert ("of the grace time, 2 s" in errors) == (code == 75)
    how = "the last step is saved" if saves == "saves" else "what came after the last checkpoint is lost"
    assert (how in errors) == (code == 75)
    least, most = seconds
    assert least <= time.monotonic() - begin < most + 3  # a busy machine


_PROGRAM = """
import os, sys
from trainer_kit.signals import StopSignals
with StopSignals(lambda: os.write(1, b"asked to stop\\n")) as signals:
    print("ready", flush=True)
    sum(1 for _ in iter(lambda: signals.received is None or len(sys.argv) > 1, False))
print("left with", signals.received.name, flush=True)
"""


def _start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_sigterm_asks_to_stop_and_the_program_goes_on_to_its_end() -> None:
    process = _start()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert "asked to stop" in output and "left with SIGTERM" in output
    assert process.returncode == 0


def test_a_second_ctrl_c_leaves_at_once_with_130() -> None:
    process = _start("never stops by itself")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked to stop\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    seen = threading.Event()
    with StopSignals(seen.set) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(5)
        assert signals.received == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_what_one_inside_another_receives_is_not_lost_when_it_ends() -> None:
    seen = threading.Event()
    with StopSignals(seen.set) as around:
        with StopSignals(lambda: None) as ended:
            pass
        with StopSignals(lambda: None) as inside:
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen.wait(5)
            while inside.received is None:  # told last
                time.sleep(0.01)
        assert (around.received, inside.received, ended.received) == (signal.SIGTERM, signal.SIGTERM, None)


def test_one_that_is_entered_after_the_signal_is_asked_to_stop_at_once() -> None:
    seen, asked = threading.Event(), threading.Event()
    with StopSignals(seen.set):
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(5)
        with StopSignals(asked.set) as inside:
            assert asked.wait(5) and inside.received == signal.SIGTERM
    with StopSignals(lambda: None) as next_one:
        assert next_one.received is None


def test_outside_the_main_thread_nothing_is_touched() -> None:
    handlers: list[object] = []

    def enter() -> None:
        with StopSignals(lambda: None):
            handlers.append(signal.getsignal(signal.SIGTERM))
            time.sleep(0.01)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
