"""Measures the waiting times of a user: whole processes, started cold, one after the other, seen from outside.

Their output is read through a pipe, unbuffered. A command's time ends when the process does. The first step's ends when
the first line `train | step N` with N above 0 arrives: all print it after the first loop, and a loop is one step here.
Memory is that of /proc (Linux only).

The contenders do not train the same: ours and the loop by hand read real digits into a small dense net; Model
Garden's `mock` feeds zeros to one dense unit, which is in its favour, and has no optimizer, so sgd is named for it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.benchmarks.race import last_words
from scripts.benchmarks.results import Goal, Row, Section

OURS = ("-m", "trainer_kit.train", "--experiment=digits_mlp", "--mode=train")
PEER = ("-m", "official.nlp.train", "--experiment=mock", "--mode=train")
BY_HAND = ("-m", "scripts.benchmarks.cold_loop")
TRAINER_KIT = str(Path(sys.executable).with_name("trainer-kit"))
FIVE_STEPS = "--params_override=trainer.train_steps=5,trainer.steps_per_loop=1,trainer.summary_interval=1"
SGD = ",trainer.optimizer_config.optimizer.type=sgd,trainer.optimizer_config.learning_rate.type=constant"
MISTAKE = "--params_override=trainer.train_stepz=5"

STEP_LINE = re.compile(r"train \| step:? +([\d,]+)")
MEMORY_STEPS = (2_000, 20_000)
MEMORY_RUN = "--params_override=trainer.train_steps=21000,trainer.steps_per_loop=200,trainer.summary_interval=200"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to measure.

    Attributes:
      name, label, to, goals: See Row.
      measure: Returns (seconds, MiB); MiB is NaN if memory is not measured.
      quick: Whether a quick measurement includes the command.
    """

    name: str
    label: str
    measure: Callable[[], tuple[float, float]]
    to: str = ""
    goals: tuple[Goal, ...] = ()
    quick: bool = False


COMMANDS = (
    Command(
        name="model_garden",
        label="first step: Model Garden, mock",
        measure=lambda: first_step(PEER, FIVE_STEPS + SGD),
        quick=True,
    ),
    Command(
        name="again",
        label="first step: Model Garden, again",
        measure=lambda: first_step(PEER, FIVE_STEPS + SGD),
        to="model_garden",
        quick=True,
    ),
    Command(name="by_hand", label="first step: by hand", measure=lambda: first_step(BY_HAND), to="model_garden"),
    Command(
        name="ours",
        label="first step: ours, digits_mlp",
        measure=lambda: first_step(OURS, FIVE_STEPS),
        to="model_garden",
        goals=(Goal(to="model_garden", bound=0.85, at_most=True),),
        quick=True,
    ),
    Command(
        name="mistake_model_garden",
        label="config mistake until its message: Model Garden",
        measure=lambda: until_exit([sys.executable, *PEER, MISTAKE], expect=1),
    ),
    Command(
        name="mistake",
        label="config mistake until its message: ours",
        measure=lambda: until_exit([sys.executable, *OURS, MISTAKE], expect=2),
        to="mistake_model_garden",
    ),
    Command(
        name="list", label="trainer-kit list", measure=lambda: until_exit([TRAINER_KIT, "list"], expect=0, run=False)
    ),
    Command(
        name="help",
        label="trainer-kit --help",
        measure=lambda: until_exit([TRAINER_KIT, "--help"], expect=0, run=False),
    ),
)
FIRST_STEPS = ("model_garden", "again", "by_hand", "ours")


def measure(commands: Sequence[Command], rounds: int, *, warm_up: bool, growing: bool) -> list[Section]:
    """Returns the sections `startup` and `memory`.

    Args:
      commands: The commands of COMMANDS to run in turn.
      rounds: The number of rounds that count.
      warm_up: Whether a round that does not count comes first, to load the libraries into the disk cache.
      growing: Whether to measure memory during a longer run too.
    """
    taken: dict[str, list[tuple[float, float]]] = {command.name: [] for command in commands}
    failed: dict[str, str] = {}
    for number in range(0 if warm_up else 1, rounds + 1):
        print(f"startup: {f'round {number} of {rounds}' if number else 'warming up'}", file=sys.stderr, flush=True)
        for command in commands:
            if command.name in failed:
                continue
            try:
                figures = command.measure()
            except RuntimeError as error:
                failed[command.name] = str(error)
                continue
            taken[command.name] += [figures] if number else []
    return [_startup(commands, taken, failed), _memory(commands, taken, failed, growing)]


def first_step(program: Sequence[str], override: str = "") -> tuple[float, float]:
    """Returns the seconds until the first step is done, and the peak of resident memory until then.

    Raises:
      RuntimeError: when the process ends before; with the end of its output.
    """
    begin = time.perf_counter()
    with _training(program, override) as (process, steps):
        for step in steps:
            if step > 0:
                return time.perf_counter() - begin, _mib(process.pid, "VmHWM")
    raise AssertionError("unreachable: the steps end with an error")


def until_exit(command: Sequence[str], expect: int, run: bool = True) -> tuple[float, float]:
    """Returns the seconds until a command ends, and NaN for its memory.

    Args:
      command: The command with its arguments.
      expect: The expected exit code.
      run: Whether the command gets a model_dir.

    Raises:
      RuntimeError: when it ends with another code.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = [*command, *([f"--model_dir={folder}/run"] if run else [])]
        begin = time.perf_counter()
        done = subprocess.run(whole, env=_environment(), capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    if done.returncode != expect:
        raise RuntimeError(_failure(whole, f"ended with {done.returncode}, not {expect}", done.stdout + done.stderr))
    return seconds, float("nan")


def _startup(
    commands: Sequence[Command], taken: dict[str, list[tuple[float, float]]], failed: dict[str, str]
) -> Section:
    rows = [
        Row(
            name=command.name,
            label=command.label,
            to=command.to,
            goals=command.goals,
            values=[] if command.name in failed else [[seconds] for seconds, _ in taken[command.name]],
            failed=failed.get(command.name, ""),
        )
        for command in commands
    ]
    title = "what a user waits for, from the start of a cold process"
    return Section(name="startup", title=title, unit="s", rows=rows, equals=("model_garden", "again"))


def _memory(
    commands: Sequence[Command],
    taken: dict[str, list[tuple[float, float]]],
    failed: dict[str, str],
    growing: bool,
) -> Section:
    rows = [
        Row(
            name=command.name,
            label=command.label.replace("first step:", "peak to the first step:"),
            to=command.to,
            values=[] if command.name in failed else [[mib] for _, mib in taken[command.name]],
            failed=failed.get(command.name, ""),
        )
        for command in commands
        if command.name in FIRST_STEPS
    ]
    if growing:
        early, late = f"ours_{MEMORY_STEPS[0]}", f"ours_{MEMORY_STEPS[1]}"
        rows += [
            Row(name=name, label=f"ours after {steps:,} steps", to=early)
            for name, steps in zip((early, late), MEMORY_STEPS, strict=True)
        ]
        print("memory: a run of 21,000 steps", file=sys.stderr, flush=True)
        try:
            for row, value in zip(rows[-2:], _memory_at(MEMORY_STEPS), strict=True):
                row.values = [[value]]
        except RuntimeError as error:
            rows[-2].failed = rows[-1].failed = str(error)
    title = "resident memory of the same processes, the libraries they import included"
    return Section(name="memory", title=title, unit="MiB", rows=rows, equals=("model_garden", "again"))


def _memory_at(marks: Sequence[int], samples: int = 5) -> list[float]:
    """Returns MiB at each mark: the median of samples taken when the lines of that step and the next ones arrive."""
    taken: list[list[float]] = [[] for _ in marks]
    with _training(OURS, MEMORY_RUN) as (process, steps):
        for step in steps:
            for mark, values in zip(marks, taken, strict=True):
                if step >= mark and len(values) < samples:
                    values.append(_mib(process.pid, "VmRSS"))
            if len(taken[-1]) == samples:
                break
    return [statistics.median(values) for values in taken]


@contextmanager
def _training(program: Sequence[str], override: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[int]]]:
    """Starts a training process; yields it and an iterator over the steps in its output; ends it afterwards."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        arguments = [f"--model_dir={folder}/run", override] if override else []
        command = [sys.executable, *program, *arguments]
        process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield process, _steps(process, command, errors)
        finally:
            process.kill()
            process.communicate()


def _steps(process: subprocess.Popen[str], command: Sequence[str], errors: IO[str]) -> Iterator[int]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = STEP_LINE.search(line)
        if found:
            yield int(found[1].replace(",", ""))
    errors.seek(0)
    raise RuntimeError(_failure(command, "ended too early", "".join(seen) + errors.read()))


def _mib(pid: int, what: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 1024


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _failure(command: Sequence[str], what: str, output: str) -> str:
    return f"{' '.join(command)} {what}: {last_words(output)}"
