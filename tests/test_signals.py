"""Signals, in real processes."""

import os
import signal
import subprocess
import sys
import threading
import time

from trainer_kit.signals import StopSignals

_PROGRAM = """
import sys, time
from trainer_kit.signals import StopSignals
with StopSignals(lambda: print("asked to stop", flush=True)) as signals:
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
