"""Commands answer signals from their first line on, and keep their exit code to the last; in real
processes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.builders import start_python
from trainer_kit.errors import ExitCode
from trainer_kit.process.startup_signals import get_signal_exit_code

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP


def test_exit_codes_are_those_of_the_one_table() -> None:
    assert get_signal_exit_code(TERM) == ExitCode.PREEMPTED
    assert get_signal_exit_code(HUP) == ExitCode.PREEMPTED
    assert get_signal_exit_code(INT) == ExitCode.INTERRUPTED


TRAIN = [
    "-m",
    "trainer_kit.train",
    "--experiment=x",
    "--mode=train",
    "--model_dir=run",
    "--import_module=slow.py",
]
LIST = ["-m", "trainer_kit", "list", "--import_module=slow.py"]


_STARTING = """
import time
from trainer_kit.process.startup_signals import install_exit_handlers
install_exit_handlers()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "numbers", "code"),
    [
        (TRAIN, [INT, TERM], 75),
        (LIST, [INT], 130),
        (["-c", _STARTING], [TERM], 75),
        (["-c", _STARTING], [HUP], 75),
        (["-c", _STARTING], [TERM, INT], 75),
    ],
)
def test_signals_while_modules_are_imported(
    command: list[str], numbers: list[int], code: int, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = start_python(*command, cwd=tmp_path, env=ENVIRONMENT)

    for number in numbers:
        process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == code
    assert errors.startswith("stopped by SIG")
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_sigterm_while_tensorflow_is_imported_is_never_lost(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("print('ready', flush=True)\nimport tensorflow\n")
    process = start_python(*TRAIN, cwd=tmp_path, env=ENVIRONMENT)
    # NumPy's extensions come first, then TensorFlow's, which are for test_command_line.py.
    time.sleep(0.2)

    process.send_signal(TERM)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    assert "ignored" not in errors


_ENDING = """
import atexit, sys, time
from trainer_kit.process.startup_signals import record_exit_code, install_exit_handlers
install_exit_handlers()
atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
sys.exit(record_exit_code(int(sys.argv[1])))
"""


@pytest.mark.parametrize(("own", "number", "code"), [(0, INT, 0), (3, TERM, 3), (130, INT, 130)])
def test_a_signal_while_python_shuts_down_changes_no_result(
    own: int, number: int, code: int, tmp_path: Path
) -> None:
    process = start_python("-c", _ENDING, str(own), says="ending", cwd=tmp_path)

    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert errors == ""
    assert process.returncode == code


_UNDER_NOHUP = """
import signal
from trainer_kit.process.startup_signals import install_exit_handlers
install_exit_handlers()
signal.raise_signal(signal.SIGHUP)
print("ready")
"""


def test_an_ignored_sighup_stays_ignored(tmp_path: Path) -> None:
    process = start_python(
        "-c", _UNDER_NOHUP, cwd=tmp_path, preexec_fn=lambda: signal.signal(HUP, signal.SIG_IGN)
    )
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
