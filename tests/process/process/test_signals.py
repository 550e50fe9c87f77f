"""Signals, in real processes."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.builders import start_python, wait_until
from trainer_kit.errors import InterruptedRunError, PreemptedError
from trainer_kit.process.signals import StoppableRun, StopSignals


class _Run(StoppableRun):
    """Remembers that it was asked to stop."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1
        self.asked.set()


_LATE = """
import signal, sys, time
from trainer_kit.process.signals import StoppableRun, StopSignals
_, grace, work, saves = sys.argv
class Run(StoppableRun):
    def save_late(self):
        print("late", flush=True)
        return saves == "saves"
with StopSignals(Run(), float(grace)) as signals:
    print("ready", flush=True)
    while signals.received_signal is None:
        time.sleep(0.01)
    time.sleep(float(work))
print("done", flush=True)
"""


def _stop_late_program(work: float, saves: str) -> tuple[int, str, str, float]:
    """The exit code, both outputs and the seconds from SIGTERM to the end of a process with 1.2 s
    of grace time.
    """
    process = start_python("-c", _LATE, "1.2", str(work), saves)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    return process.returncode, output, errors, time.monotonic() - begin


def test_the_grace_time_is_given_in_full_unless_all_is_saved() -> None:
    cases = [
        (0.1, "cannot", 0, "done\n", (0.1, 0.6)),
        # The second half of the grace time is the main thread's too.
        (0.8, "cannot", 0, "late\ndone\n", (0.8, 1.2)),
        (9.0, "cannot", 75, "late\n", (1.15, 2.0)),
        (9.0, "saves", 75, "late\n", (1.05, 1.2)),  # nothing to wait for any more
    ]
    with ThreadPoolExecutor(len(cases)) as pool:  # most of each is a wait
        ends = list(pool.map(lambda case: _stop_late_program(case[0], case[1]), cases))

    for case, (code, output, errors, seconds) in zip(cases, ends, strict=True):
        _, saves, expected_code, expected_output, (shortest, longest) = case
        assert code == expected_code, errors
        assert output == expected_output, errors
        is_cut = code == 75
        assert ("of the grace time, which is 1.2 s" in errors) == is_cut
        loss = "nothing is" if saves == "saves" else "the steps after the last checkpoint are"
        assert (f"{loss} lost" in errors) == is_cut
        assert shortest <= seconds < longest + 3  # a busy machine


_BUSY = {
    "a thread": "threading.Thread(target=time.sleep, args=(60,)).start()",
    "a pool": "concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 60)",
    "a child": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(8,)).start()",
    "an atexit handler": "atexit.register(time.sleep, 60)",
}
_ENDS = """
import atexit, concurrent.futures, multiprocessing, os, sys, threading, time
from trainer_kit.errors import PreemptedError
from trainer_kit.process.signals import StopSignals
from trainer_kit.process.startup_signals import record_exit_code, install_exit_handlers
_, is_command, busy = sys.argv
if is_command:
    install_exit_handlers()
exec(busy)
try:
    with StopSignals(grace_seconds=1.6) as signals:
        os.kill(os.getpid(), 15)
        while signals.received_signal is None:
            time.sleep(0.01)
        signals.check_not_stopped("at step 3")
except PreemptedError as error:
    print(error)  # not flushed
    sys.exit(record_exit_code(error.exit_code) if is_command else error.exit_code)
"""


def test_nothing_keeps_a_stopped_program_after_the_grace_time() -> None:
    def run(is_command: str, busy: str) -> tuple[int, str, str, float]:
        begin = time.monotonic()
        command = [sys.executable, "-c", _ENDS, is_command, busy]
        # Files, not pipes: a child keeps them open.
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            done = subprocess.run(command, stdout=output, stderr=errors, timeout=30)
            output.seek(0)
            errors.seek(0)
            return done.returncode, output.read(), errors.read(), time.monotonic() - begin

    # Python joins the threads of pools before it says that the main thread has ended, so only
    # commands are sure to end.
    cases = [
        *(("command", busy) for busy in _BUSY),
        *(("", busy) for busy in _BUSY if busy != "a pool"),
    ]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda case: run(case[0], _BUSY[case[1]]), cases))

    for case, (code, output, errors, seconds) in zip(cases, ends, strict=True):
        assert (code, output) == (75, "stopped by SIGTERM at step 3\n"), (case, errors)
        assert "ended at the end of the grace time" in errors, case
        assert seconds < 6, case


def test_a_program_that_goes_on_after_a_stop_is_left_alone() -> None:
    program = f"{_ENDS.replace('sys.exit(', 'signals = (')}\ntime.sleep(2.5)\nprint('went on')"
    command = [sys.executable, "-c", program, "", ""]

    done = subprocess.run(command, capture_output=True, text=True, timeout=30)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "stopped by SIGTERM at step 3\nwent on\n"


def test_a_run_in_another_thread_warns_of_signals(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopSignals().__enter__)
    thread.start()
    thread.join()

    assert "not in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


# By its clock any two signals are a second apart.
_PROGRAM = """
import itertools, os, sys
from trainer_kit.process.signals import StoppableRun, StopSignals
class Run(StoppableRun):
    def stop(self):
        os.write(1, b"asked to stop\\n")
with StopSignals(Run(), clock=itertools.count().__next__) as signals:
    print("ready", flush=True)
    sys.stdin.readline()
print("left with", signals.received_signal and signals.received_signal.name, flush=True)
"""
TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP


@pytest.mark.parametrize(("first", "code"), [(INT, 130), (TERM, 75)])
def test_a_stop_is_requested_once_and_a_second_ctrl_c_exits(first: int, code: int) -> None:
    process = start_python("-c", _PROGRAM)
    assert process.stdout is not None

    process.send_signal(first)
    assert process.stdout.readline() == "asked to stop\n"

    if first == TERM:
        process.send_signal(INT)
        time.sleep(0.2)
        assert process.poll() is None
    process.send_signal(INT)

    assert (process.wait(timeout=20), process.stdout.read()) == (code, "")


class _Clock:
    """Shows the seconds that it is set to; `readings` counts how often it was read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.seconds


@pytest.mark.parametrize(
    ("sent", "received", "exits"),
    [
        ([(0, TERM)], TERM, []),
        ([(0, HUP)], HUP, []),
        ([(0, TERM), (0, INT)], TERM, []),
        ([(0, INT), (0, TERM)], TERM, []),
        ([(0, INT), (9, TERM)], TERM, []),  # however long after it
        ([(0, TERM), (9, INT)], TERM, []),
        ([(0, INT), (0.9, INT)], INT, []),  # one key press, forwarded twice
        ([(0, INT), (1, INT)], INT, [130]),
        ([(0, INT), (0.9, INT), (1, INT)], INT, [130]),
        ([(0, TERM), (5, INT), (6, INT)], TERM, [75]),
    ],
)
def test_a_second_ctrl_c_exits_only_after_a_second(
    sent: list[tuple[float, signal.Signals]],
    received: int,
    exits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exit_codes: list[int] = []
    monkeypatch.setattr("trainer_kit.process.signals.os._exit", exit_codes.append)
    clock = _Clock()
    run = _Run()

    interrupts = 0
    with StopSignals(run, clock=clock) as signals:
        for seconds, number in sent:
            clock.seconds = seconds
            os.kill(os.getpid(), number)
            interrupts += number == INT
            wait_until(lambda: signals.received_signal is not None)
            wait_until(lambda least=interrupts: clock.readings >= least)
        wait_until(lambda: signals.received_signal == received and exit_codes == exits)

    assert run.stops == 1
    assert exit_codes == exits


def test_sighup_stays_ignored_below_nohup() -> None:
    process = start_python("-c", _PROGRAM, preexec_fn=lambda: signal.signal(HUP, signal.SIG_IGN))
    process.send_signal(HUP)
    assert process.communicate("\n", timeout=20)[0] == "left with None\n"


_POOL = """
import multiprocessing, os, signal, time
from trainer_kit.process.signals import StopSignals
print("ready", flush=True)
with StopSignals() as signals:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    time.sleep(0.2)
print(child.exitcode, signals.received_signal, flush=True)
"""


def test_a_forked_child_can_be_ended_and_its_signals_are_its_own() -> None:
    assert start_python("-c", _POOL).communicate(timeout=40)[0] == "-15 None\n"


def test_a_sigterm_while_ctrl_c_ends_the_run_means_a_restart() -> None:
    with pytest.raises(PreemptedError, match="interrupted"), StopSignals() as signals:
        for number in (INT, TERM):
            os.kill(os.getpid(), number)
            wait_until(lambda number=number: signals.received_signal == number)
        raise InterruptedRunError("interrupted")


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run = _Run()
    with StopSignals(run) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.asked.wait(5)
        assert signals.received_signal == signal.SIGTERM

    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_handler_that_python_does_not_know_becomes_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(HUP)
    set_handler = signal.signal

    def set_after_handler_of_c(number: int, handler: Any) -> None:
        set_handler(number, handler)

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", set_after_handler_of_c)
        signals = StopSignals().__enter__()
    signals.__exit__(None, None, None)

    assert signal.getsignal(HUP) == signal.SIG_DFL
    signal.signal(TERM, signal.SIG_DFL)
    signal.signal(INT, signal.default_int_handler)
    signal.signal(HUP, before)


def test_a_signal_of_a_nested_handler_is_not_lost_at_its_end() -> None:
    run = _Run()
    with StopSignals(run) as outer:
        with StopSignals() as earlier:
            pass
        with StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert run.asked.wait(5)
            wait_until(lambda: inner.received_signal is not None)  # it learns of it last
        assert outer.received_signal == signal.SIGTERM
        assert inner.received_signal == signal.SIGTERM
        assert earlier.received_signal is None


def test_a_run_entered_after_the_signal_stops_at_once() -> None:
    run = _Run()
    nested_run = _Run()
    with StopSignals(run):
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.asked.wait(5)
        with StopSignals(nested_run) as inner:
            assert nested_run.asked.wait(5)
            assert inner.received_signal == signal.SIGTERM
    with StopSignals() as later:
        assert later.received_signal is None
