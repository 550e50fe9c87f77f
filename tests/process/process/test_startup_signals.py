"""Commands answer signals from their first line on, and keep their exit code to the last; in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer_kit.errors import ExitCode
from trainer_kit.process.startup_signals import exit_code

ROOT = Path(__file__).parents[3]
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def test_exit_codes_are_those_of_the_one_table() -> None:
    assert [exit_code(number) for number in (TERM, HUP, INT)] == [
        ExitCode.PREEMPTED,
        ExitCode.PREEMPTED,
        ExitCode.INTERRUPTED,
    ]


def _start(arguments: list[str], folder: Path, ignored: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignored and (lambda: signal.signal(ignored, signal.SIG_IGN) and None),
    )


def _started(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """Returns a process that has printed "ready"."""
    process = _start(arguments, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


TRAIN = ["-m", "trainer_kit.train", "--experiment=x", "--mode=train", "--model_dir=run", "--import_module=slow.py"]
LIST = ["-m", "trainer_kit", "list", "--import_module=slow.py"]


_STARTED = """
import time
from trainer_kit.process.startup_signals import leave_when_asked
leave_when_asked()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "numbers", "code"),
    [
        (TRAIN, [INT, TERM], 75),
        (LIST, [INT], 130),
        (["-c", _STARTED], [TERM], 75),
        (["-c", _STARTED], [HUP], 75),
        (["-c", _STARTED], [TERM, INT], 75),
    ],
)
def test_signals_while_modules_are_imported(command: list[str], numbers: list[int], code: int, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = _started(command, tmp_path)
    for number in numbers:
        process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert errors.startswith("stopped by SIG") and len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_sigterm_while_tensorflow_is_imported_is_never_lost(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("print('ready', flush=True)\nimport tensorflow\n")
    process = _started(TRAIN, tmp_path)
    time.sleep(0.2)  # seconds; NumPy's extensions come first, then TensorFlow's, of which test_command_line.py tests
    process.send_signal(TERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Traceback" not in errors and "ignored" not in errors


_ENDING = """
import atexit, sys, time
from trainer_kit.process.startup_signals import ends_with, leave_when_asked
leave_when_asked()
atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
sys.exit(ends_with(int(sys.argv[1])))
"""


@pytest.mark.parametrize(("own", "number", "code"), [(0, INT, 0), (3, TERM, 3), (130, INT, 130)])
def test_a_signal_while_python_shuts_down_changes_no_result(own: int, number: int, code: int, tmp_path: Path) -> None:
    process = _start(["-c", _ENDING, str(own)], tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(number)
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", code)


_UNDER_NOHUP = """
import signal
from trainer_kit.process.startup_signals import leave_when_asked
leave_when_asked()
signal.raise_signal(signal.SIGHUP)
print("goes on")
"""


def test_an_ignored_sighup_stays_ignored(tmp_path: Path) -> None:
    process = _start(["-c", _UNDER_NOHUP], tmp_path, ignored=HUP)
    assert process.communicate(timeout=30) == ("goes on\n", "")
