"""A job ends with the exit code of the error that ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from trainer_kit.compat.pipelines.job_exits import exit_codes
from trainer_kit.errors import (
    DataError,
    DivergedError,
    InterruptedRunError,
    PreemptedError,
    TrainerKitError,
    UsageError,
)

_STOPPED = """
import os, signal
from trainer_kit.compat.pipelines.job_exits import exit_codes
with exit_codes():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError, 2),
        (DivergedError, 3),
        (DataError, 5),
        (PreemptedError, 75),
        (InterruptedRunError, 130),
    ],
)
def test_an_error_that_explains_itself_is_an_exit_code(
    error: type[TrainerKitError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise error("this is why")

    assert ended.value.code == code
    prefix = "" if error in (PreemptedError, InterruptedRunError) else "error: "
    assert capsys.readouterr().err == f"{prefix}this is why\n"


def test_an_error_of_the_program_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), exit_codes():
        raise ZeroDivisionError


def test_an_exit_of_the_program_keeps_its_code() -> None:
    with pytest.raises(SystemExit) as ended, exit_codes(), exit_codes():
        raise UsageError("once")

    assert ended.value.code == 2


def test_sigterm_outside_of_a_run_ends_with_75() -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED], capture_output=True, text=True)
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "handler", [signal.SIG_DFL, lambda *_: None], ids=["the default", "its own"]
)
def test_a_handler_of_the_program_is_back_afterwards(handler: Any) -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with exit_codes():
            assert (signal.getsignal(signal.SIGTERM) is handler) == (handler is not signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
