"""Proves on an experiment of yours that a killed run ends with the same bits as one that was never stopped.

The experiment is run once without a fault and once with kills, in real processes, in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_kit import files
from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.errors import ExitCode, TrainerKitError, UsageError

_MODE = "train_and_eval"
_PASSED_ON = ("import_module", "config_file", "gin_file", "gin_params", "params_override")
_SIGNALS = {"kill": [signal.SIGKILL], "term": [signal.SIGTERM], "both": [signal.SIGKILL, signal.SIGTERM]}
_POLL_SECONDS = 0.01
_REPORT = re.compile(rb"train \| step (\d+)")
_STARTED = re.compile(rf"{_MODE} from step (\d+)")
_SHOWN = 12  # differences, and lines of a run that failed


class DoctorError(TrainerKitError):
    """The run without a fault has failed already, or one that was started again has."""

    exit_code = ExitCode.BUG


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
      sent: the signal.
      after: the step whose report was waited for.
      seconds: from that report to the signal.
      code: its exit code, or minus the number of the signal that ended it.
      step: the last one in the history when it was dead.
    """

    sent: signal.Signals
    after: int
    seconds: float
    code: int
    step: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the experiment with the sources of its config, and the kills."""
    add_config_arguments(parser)
    parser.add_argument("--kills", type=int, default=5, help="How often the run is killed. Default: 5.")
    parser.add_argument(
        "--signal", choices=_SIGNALS, default="both", help="The signal that kills it. Default: both, in turn."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="The seed of the moments at which the run is killed. Default: 0."
    )
    parser.add_argument("--keep", action="store_true", help="Keeps the two folders, and says where they are.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the experiment without and with kills, and compares; exit code 1 when they differ.

    Raises:
      UsageError: when the config is wrong, or the run has too few steps for the kills.
      DoctorError: when a run fails.
    """
    if arguments.kills < 1:
        raise UsageError(f"--kills: {arguments.kills} is not 1 or more")
    resolve_arguments(arguments)  # what is wrong with the config is told at once
    base = Path(tempfile.mkdtemp(prefix="trainer_kit_doctor_"))
    try:
        return _resume(arguments, base)
    finally:
        if arguments.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)


def _resume(arguments: argparse.Namespace, base: Path) -> int:
    whole, killed = base / "uninterrupted", base / "killed"
    seconds = _to_the_end(_command(arguments, whole), whole)
    warnings = _inexact(whole)
    steps, reports = _last_step(whole), len(_REPORT.findall(_log(whole).read_bytes()))
    print(f"uninterrupted: {steps} steps, {seconds:.1f} s from the first report to the end", flush=True)
    chance = random.Random(arguments.seed)
    for line in warnings:
        print(f"the run says: {line}", flush=True)
    kills: list[Kill] = []
    starts: list[int] = []
    while len(kills) < arguments.kills:
        # After a share of the steps that are left, but not in the last two loops: the run would end meanwhile.
        left = max(0, steps * (1 - 2 / max(reports, 1)) - _last_step(killed))
        after = _last_step(killed) + chance.uniform(0, 2 * left / (arguments.kills - len(kills) + 1))
        delay = chance.uniform(0, seconds / max(reports, 1))
        signals = _SIGNALS[arguments.signal]
        sent = signals[len(kills) % len(signals)]
        kill = _kill(_command(arguments, killed), killed, sent, int(after), delay)
        starts += _tell(kills, killed)
        if kill is None:
            break
        kills.append(kill)
    else:
        _to_the_end(_command(arguments, killed), killed)
        starts += _tell(kills, killed)
    return _verdict(arguments, whole, killed, len(kills), starts, bool(warnings))


def _command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    given = [f"--{name}={value}" for name in _PASSED_ON for value in getattr(arguments, name)]
    run_flags = [f"--experiment={arguments.experiment}", f"--mode={_MODE}", f"--model_dir={folder}"]
    return [sys.executable, "-m", "trainer_kit.train", *run_flags, *given]


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with open(_log(folder), "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _to_the_end(command: list[str], folder: Path) -> float:
    """Runs to the end; returns the seconds from the first new line of the history to the end.

    Raises:
      DoctorError: when the run fails.
    """
    with _ended_with_us(_start(command, folder)) as process:
        _wait_for_report(process, folder)
        begin = time.monotonic()
        if process.wait():
            raise _failed(process.returncode, folder)
        return time.monotonic() - begin


def _kill(command: list[str], folder: Path, sent: signal.Signals, after: int, seconds: float) -> Kill | None:
    """Kills a run `seconds` after its report of step `after` or later; None if it came to its end before that.

    Raises:
      DoctorError: when it ended otherwise than by the signal.
    """
    with _ended_with_us(_start(command, folder)) as process:
        _wait_for_report(process, folder, after)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
        code = process.wait()
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED, -sent):
        raise _failed(code, folder)
    return None if code == ExitCode.DONE else Kill(sent, after, seconds, code, _last_step(folder))


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kills the process when it still runs at the end, as after Ctrl-C."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_report(process: subprocess.Popen[bytes], folder: Path, step: int = 0) -> None:
    """Returns when the process has told of a training loop that ended at `step` or later, or has ended."""
    while process.poll() is None:
        reports = _REPORT.findall(_log(folder).read_bytes())
        if reports and int(reports[-1]) >= step:
            return
        time.sleep(_POLL_SECONDS)


def _tell(kills: list[Kill], folder: Path) -> list[int]:
    """Prints the last kill, if any, and what it has cost, which the log of the process after it tells.

    Returns:
      The step that this process went on from, if it told one.
    """
    started = _STARTED.search(_log(folder).read_text(errors="replace"))
    if not kills or not started:
        return []
    kill, start = kills[-1], int(started[1])
    print(
        f"kill {len(kills)}: {kill.sent.name} {kill.seconds:.2f} s after a report, at step {kill.step}; "
        f"exit code {kill.code}; resumed from step {start}, {max(kill.step - start, 0)} steps lost",
        flush=True,
    )
    return [start]


def _inexact(folder: Path) -> list[str]:
    """What a run itself says of data or steps whose resume may not be exact."""
    lines = _log(folder).read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith(("task.train_data: ", "the training step uses "))]


def _verdict(
    arguments: argparse.Namespace, whole: Path, killed: Path, kills: int, starts: list[int], warned: bool
) -> int:
    from trainer_kit.evals.run_comparison import compare_runs, first_different_step

    differences = compare_runs(whole, killed)
    if differences:
        print(f"not the same after {kills} kills; one is the uninterrupted run, the other the killed one")
        print(_first_difference(first_different_step(whole, killed), starts))
        for difference in differences[:_SHOWN]:
            print(f"different: {difference}")
        return ExitCode.BUG
    if kills < arguments.kills:
        raise UsageError(
            f"the run had ended before kill {kills + 1} of {arguments.kills}, the same up to there; give it more steps "
            "(trainer.train_steps), shorter loops (trainer.steps_per_loop), or fewer --kills"
        )
    doubt = "; this time, that is: see what the run says above" if warned else ""
    print(f"the same, bit by bit: {kills} kills, {kills} restarts{doubt}")
    return ExitCode.DONE


def _first_difference(step: int | None, starts: list[int]) -> str:
    """Says where to look: at the experiment itself, or at what a checkpoint does not hold."""
    if step is None:
        return "what was reported is the same"
    if not starts or step <= starts[0]:
        return (
            f"first different at step {step}, before any resume: the experiment gives other numbers each time it runs; "
            "set runtime.random_seed, and draw no random numbers but from seeded generators"
        )
    resumed = max(start for start in starts if start < step)
    return (
        f"first different at step {step}, after the resume from step {resumed}: the data, or a state that the task "
        "keeps, is not in the checkpoint"
    )


def _last_step(folder: Path) -> int:
    return max((int(line.get("step", 0)) for line in files.read_lines(folder / "metrics.jsonl")), default=0)


def _log(folder: Path) -> Path:
    """What the newest process of the run has printed; beside the run's folder, which is the run's own."""
    return folder.with_suffix(".log")


def _failed(code: int, folder: Path) -> DoctorError:
    lines = _log(folder).read_text(errors="replace").splitlines()[-_SHOWN:]
    return DoctorError(f"the run ended with exit code {code}; its last lines:\n  " + "\n  ".join(lines))
