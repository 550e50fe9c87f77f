"""Whole processes, started cold and seen from outside: what a user waits for.

A command's time ends when the process does. The first step's ends when the first line
`train | step N` arrives: all print it after the first loop, and a loop is one step here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from scripts.benchmarks.pacer import Pacer
from scripts.benchmarks.race import last_error

STEP_LINE = re.compile(r"train \| step:? +[1-9]")


def reach_first_step(pacer: Pacer, folder: str, *, program: Sequence[str]) -> None:
    """Runs Python with the arguments `model_description` until its first step, repeatedly."""
    for number in range(sys.maxsize):
        begin = time.perf_counter()
        process = _start([sys.executable, *program, f"--model_dir={folder}/{number}"])
        try:
            _wait_for_step(process)
            seconds = time.perf_counter() - begin
        finally:
            process.kill()
            process.communicate()
        pacer.report_figure(seconds)


def run_to_end(pacer: Pacer, folder: str, *, command: Sequence[str], code: int = 0) -> None:
    """Repeatedly runs a command, which has to end with the exit code `code`."""
    del folder
    while True:
        begin = time.perf_counter()
        process = _start(command)
        output, _ = process.communicate()
        seconds = time.perf_counter() - begin
        if process.returncode != code:
            raise RuntimeError(f"{process.returncode} instead of {code}: {last_error(output)}")
        pacer.report_figure(seconds)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_step(process: subprocess.Popen[str]) -> None:
    """Reads the output of the process until it has printed a step.

    Raises:
      RuntimeError: when the process ends before.
    """
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if STEP_LINE.search(line):
            return
    raise RuntimeError(f"ended before the first step: {last_error(''.join(lines))}")
