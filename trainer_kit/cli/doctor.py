"""Proves on an experiment of yours what is promised: `doctor resume` kills runs of it, and compares the bits.

The experiment is run once without a fault and once with kills, in real processes, in a temporary folder. The processes
are forked by one that has imported TensorFlow: a start costs no import.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit import files
from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.errors import ExitCode, TrainerKitError, UsageError

if TYPE_CHECKING:
    from trainer_kit.testing.fork_server import Child, ForkServer

_MODE = "train_and_eval"
_PASSED_ON = ("import_module", "config_file", "gin_file", "gin_params", "params_override")
_SIGNALS = {"kill": [signal.SIGKILL], "term": [signal.SIGTERM], "both": [signal.SIGKILL, signal.SIGTERM]}
_POLL_SECONDS = 0.01
_REPORT = re.compile(r"train \| step (\d+)")
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
    """Adds what is to be proved, the experiment with the sources of its config, and the kills."""
    promised = "resume: a run that is killed ends with the same bits"
    parser.add_argument("check", choices=["resume"], metavar="resume", help=promised)
    add_config_arguments(parser)
    parser.add_argument("--kills", type=int, default=5, help="how often the run is killed (default 5)")
    parser.add_argument(
        "--signal", choices=_SIGNALS, default="both", help="SIGKILL, SIGTERM or, as by default, in turn"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals (default 0)")
    parser.add_argument("--keep", action="store_true", help="keep the two folders, and say where they are")


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
        from trainer_kit.testing.fork_server import ForkServer

        with ForkServer() as server:
            return _resume(arguments, _Runs(server, arguments), base)
    finally:
        if arguments.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)


def _resume(arguments: argparse.Namespace, runs: _Runs, base: Path) -> int:
    whole, killed = base / "uninterrupted", base / "killed"
    seconds = runs.to_the_end(whole)
    warnings = _inexact(whole)
    steps, reports = _last_step(whole), len(_REPORT.findall(_told(whole)))
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
        kill = runs.kill(killed, sent, int(after), delay)
        starts += _tell(kills, killed)
        if kill is None:
            break
        kills.append(kill)
    else:
        runs.to_the_end(killed)
        starts += _tell(kills, killed)
    differences, first = runs.compare(whole, killed)
    if differences:
        print(f"not the same after {len(kills)} kills; one is the uninterrupted run, the other the killed one")
        print(_first_difference(first, starts))
        for difference in differences[:_SHOWN]:
            print(f"different: {difference}")
        return ExitCode.BUG
    return _same(len(kills), arguments.kills, bool(warnings))


class _Runs:
    """Starts the processes of the two runs.

    Args:
      server: entered.
      arguments: parsed.
    """

    def __init__(self, server: ForkServer, arguments: argparse.Namespace) -> None:
        given = [f"--{name}={value}" for name in _PASSED_ON for value in getattr(arguments, name)]
        self._server = server
        self._flags = [f"--experiment={arguments.experiment}", f"--mode={_MODE}", *given]

    def start(self, folder: Path) -> Child:
        """Starts, or goes on with, the run of a folder."""
        return self._server.start("train", f"--model_dir={folder}", *self._flags, output=_log(folder))

    def to_the_end(self, folder: Path) -> float:
        """Runs to the end; returns the seconds from the first report to the end.

        Raises:
          DoctorError: when the run fails.
        """
        child = self.start(folder)
        _wait_for_report(child, folder)
        begin = time.monotonic()
        if code := child.wait(None).code:
            raise _failed(code, folder)
        return time.monotonic() - begin

    def kill(self, folder: Path, sent: signal.Signals, after: int, seconds: float) -> Kill | None:
        """Kills a run `seconds` after its report of step `after` or later; None if it came to its end before that.

        Raises:
          DoctorError: when it ended otherwise than by the signal.
        """
        child = self.start(folder)
        _wait_for_report(child, folder, after)
        time.sleep(seconds)
        child.kill(sent)
        code = child.wait(None).code
        if code not in (ExitCode.DONE, ExitCode.PREEMPTED, -sent):
            raise _failed(code, folder)
        return None if code == ExitCode.DONE else Kill(sent, after, seconds, code, _last_step(folder))

    def compare(self, whole: Path, killed: Path) -> tuple[list[str], int | None]:
        """Returns how the two runs differ, and the first step whose report differs; in a process with TensorFlow.

        Raises:
          DoctorError: when what they have left cannot be read.
        """
        result = whole.with_suffix(".json")
        ended = self._server.start(_write_differences, whole, killed, result).wait(None)
        if ended.code:
            raise DoctorError(f"the two runs cannot be compared:\n{ended.text}")
        return tuple(json.loads(result.read_text()))


def _write_differences(whole: Path, killed: Path, result: Path) -> None:
    from trainer_kit.testing.comparison import compare_runs, first_different_step

    result.write_text(json.dumps([compare_runs(whole, killed), first_different_step(whole, killed)]))


def _wait_for_report(child: Child, folder: Path, step: int = 0) -> None:
    """Returns when the process has told of a training loop that ended at `step` or later, or has ended."""
    while child.alive:
        reports = _REPORT.findall(_told(folder))
        if reports and int(reports[-1]) >= step:
            return
        time.sleep(_POLL_SECONDS)


def _tell(kills: list[Kill], folder: Path) -> list[int]:
    """Prints the last kill, if any, and what it has cost, which the log of the process after it tells.

    Returns:
      The step that this process went on from, if it told one.
    """
    started = _STARTED.search(_told(folder))
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
    lines = _told(folder).splitlines()
    return [line for line in lines if line.startswith(("task.train_data: ", "the training step uses "))]


def _same(kills: int, wanted: int, warned: bool) -> ExitCode:
    if kills < wanted:
        raise UsageError(
            f"the run had ended before kill {kills + 1} of {wanted}, the same up to there; give it more steps "
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


def _told(folder: Path) -> str:
    return _log(folder).read_text(errors="replace") if _log(folder).exists() else ""


def _failed(code: int, folder: Path) -> DoctorError:
    lines = _told(folder).splitlines()[-_SHOWN:]
    return DoctorError(f"the run ended with exit code {code}; its last lines:\n  " + "\n  ".join(lines))
