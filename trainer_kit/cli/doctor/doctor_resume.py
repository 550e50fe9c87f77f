"""Proves on your experiment that a killed run ends with the same bits as an uninterrupted one.

The experiment runs once without faults and once with kills, in real processes, in a temporary
folder.
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

EXAMPLE = "trainer-kit doctor resume digits --kills=3"

_MODE = "train_and_eval"
_FORWARDED_ARGUMENTS = ("import_module", "config_file", "gin_file", "gin_params", "params_override")
_SIGNALS = {
    "kill": [signal.SIGKILL],
    "term": [signal.SIGTERM],
    "both": [signal.SIGKILL, signal.SIGTERM],
}
_POLL_SECONDS = 0.01
_REPORT = re.compile(rb"train \| step (\d+)")
_START_PATTERN = re.compile(rf"{_MODE} from step (\d+)")

# The largest number of differences, or of last lines of a failed run, that are printed.
_MAX_SHOWN_LINES = 12


class DoctorError(TrainerKitError):
    """Raised when the uninterrupted run, or a restarted one, fails."""

    exit_code = ExitCode.BUG


@dataclass(frozen=True)
class Kill:
    """One kill of the run.

    Attributes:
      sent_signal: the signal that was sent.
      after_step: the step whose report the kill waited for.
      seconds: the time from that report to the signal.
      code: the process's exit code, or minus the number of the signal that ended it.
      step: the last step in metrics.jsonl after the process had ended.
    """

    sent_signal: signal.Signals
    after_step: int
    seconds: float
    code: int
    step: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, and the kills."""
    add_config_arguments(parser)
    parser.add_argument(
        "--kills", type=int, default=5, help="How often the run is killed. Default: 5."
    )
    parser.add_argument(
        "--signal",
        choices=_SIGNALS,
        default="both",
        help="The signal that kills it. Default: both, in turn.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="The seed of the random moments at which the run is killed. Default: 0.",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="Keeps the folders of the two runs, and prints where they are.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the experiment without and with kills, and compares the runs.

    The exit code is 1 when they differ.

    Raises:
      UsageError: when the config is wrong, or the run has too few steps for the kills.
      DoctorError: when a run fails.
    """
    if arguments.kills < 1:
        raise UsageError(f"--kills: must be 1 or more, not {arguments.kills}")
    # This reports mistakes in the config at once.
    resolve_arguments(arguments)
    base = Path(tempfile.mkdtemp(prefix="trainer_kit_doctor_"))
    try:
        return _run_with_kills(arguments, base)
    finally:
        if arguments.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)


def _run_with_kills(arguments: argparse.Namespace, base: Path) -> int:
    # The uninterrupted run shows how many steps and reports there are, and how long they take.
    uninterrupted_dir = base / "uninterrupted"
    killed_dir = base / "killed"
    command = _command(arguments, uninterrupted_dir)
    seconds = _run_to_end(command, uninterrupted_dir)
    steps = _last_step(uninterrupted_dir)
    log = _get_log_path(uninterrupted_dir)
    reports = len(_REPORT.findall(log.read_bytes()))
    # The run's own warnings about data or steps whose resume may not be exact
    lines = log.read_text(errors="replace").splitlines()
    warnings = [
        line for line in lines if line.startswith(("task.train_data: ", "the training step uses "))
    ]
    print(
        f"uninterrupted: {steps} steps, {seconds:.1f} s from the first report to the end",
        flush=True,
    )
    for line in warnings:
        print(f"the run says: {line}", flush=True)

    generator = random.Random(arguments.seed)
    kills: list[Kill] = []
    starts: list[int] = []
    while len(kills) < arguments.kills:
        # After a share of the remaining steps, but not in the last two loops: the run would end
        # before the kill.
        last_step = _last_step(killed_dir)
        report_count = max(reports, 1)
        last_kill_step = steps * (1 - 2 / report_count)
        remaining_steps = max(0, last_kill_step - last_step)
        remaining_kills = arguments.kills - len(kills)
        longest_share = 2 * remaining_steps / (remaining_kills + 1)
        after_step = int(last_step + generator.uniform(0, longest_share))
        delay = generator.uniform(0, seconds / report_count)
        signals = _SIGNALS[arguments.signal]
        sent_signal = signals[len(kills) % len(signals)]
        command = _command(arguments, killed_dir)
        kill = _run_until_killed(command, killed_dir, sent_signal, after_step, delay)
        starts += _print_last_kill(kills, killed_dir)
        if kill is None:
            break
        kills.append(kill)
    else:
        _run_to_end(_command(arguments, killed_dir), killed_dir)
        starts += _print_last_kill(kills, killed_dir)
    return _report_verdict(
        arguments, uninterrupted_dir, killed_dir, len(kills), starts, bool(warnings)
    )


def _command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    run_flags = [f"--experiment={arguments.experiment}", f"--mode={_MODE}", f"--model_dir={folder}"]
    config_flags = [
        f"--{name}={value}" for name in _FORWARDED_ARGUMENTS for value in getattr(arguments, name)
    ]
    return [sys.executable, "-m", "trainer_kit.train", *run_flags, *config_flags]


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with open(_get_log_path(folder), "wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _run_to_end(command: list[str], folder: Path) -> float:
    """Runs the command to its end, and returns the seconds from the first report to the end.

    Raises:
      DoctorError: when the run fails.
    """
    with _kill_on_exit(_start(command, folder)) as process:
        _wait_for_report(process, folder)
        begin = time.monotonic()
        if process.wait():
            raise _build_failure(process.returncode, folder)
        return time.monotonic() - begin


def _run_until_killed(
    command: list[str], folder: Path, sent_signal: signal.Signals, after_step: int, seconds: float
) -> Kill | None:
    """Kills a run `seconds` after its report of step `after_step` or later.

    Returns None if the run ended before that.

    Raises:
      DoctorError: when the run ended with another exit code.
    """
    with _kill_on_exit(_start(command, folder)) as process:
        _wait_for_report(process, folder, after_step)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(sent_signal)
        code = process.wait()
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED, -sent_signal):
        raise _build_failure(code, folder)
    if code == ExitCode.DONE:
        return None
    return Kill(sent_signal, after_step, seconds, code, _last_step(folder))


@contextlib.contextmanager
def _kill_on_exit(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kills the process if it still runs on exit, for example after Ctrl-C."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_report(process: subprocess.Popen[bytes], folder: Path, step: int = 0) -> None:
    """Waits until the process has reported `step` or a later one, or has ended."""
    while process.poll() is None:
        log = _get_log_path(folder)
        reports = _REPORT.findall(log.read_bytes())
        if reports and int(reports[-1]) >= step:
            return
        time.sleep(_POLL_SECONDS)


def _print_last_kill(kills: list[Kill], folder: Path) -> list[int]:
    """Prints the last kill, if any, and the steps that it cost, which the next process's log shows.

    Returns:
      The step from which that process resumed, in a list. [] if its log does not show one.
    """
    log = _get_log_path(folder)
    match = _START_PATTERN.search(log.read_text(errors="replace"))
    if not kills or not match:
        return []
    kill = kills[-1]
    start = int(match[1])
    print(
        f"kill {len(kills)}: {kill.sent_signal.name} {kill.seconds:.2f} s after a report, at step"
        f" {kill.step}; exit code {kill.code}; resumed from step {start},"
        f" {max(kill.step - start, 0)} steps lost",
        flush=True,
    )
    return [start]


def _report_verdict(
    arguments: argparse.Namespace,
    uninterrupted_dir: Path,
    killed_dir: Path,
    kills: int,
    starts: list[int],
    has_warnings: bool,
) -> int:
    # This imports TensorFlow, which the runs do in their own processes.
    from trainer_kit.evals.run_comparison import compare_runs, find_first_different_step

    differences = compare_runs(uninterrupted_dir, killed_dir)
    if differences:
        print(
            f"the runs differ after {kills} kills; below, the uninterrupted run comes first, the"
            " killed run second"
        )
        step = find_first_different_step(uninterrupted_dir, killed_dir)
        # The likely cause is the experiment itself, or an incomplete checkpoint.
        if step is None:
            print("the reported metrics of all steps are the same")
        elif not starts or step <= starts[0]:
            print(
                f"first different at step {step}, before any resume: the experiment computes other"
                " numbers each time it runs; set runtime.random_seed, draw random numbers only"
                " from seeded generators, and on a GPU set runtime.deterministic_ops=true"
            )
        else:
            resume_step = max(start for start in starts if start < step)
            print(
                f"first different at step {step}, after the resume from step {resume_step}: the"
                " checkpoint does not hold the position in the data, or some state of the task"
            )
        for difference in differences[:_MAX_SHOWN_LINES]:
            print(f"different: {difference}")
        return ExitCode.BUG

    if kills < arguments.kills:
        raise UsageError(
            f"the run ended before kill {kills + 1} of {arguments.kills}, and is the same so far;"
            " give it more steps (trainer.train_steps) or shorter loops (trainer.steps_per_loop),"
            " or ask for fewer --kills"
        )
    doubt = "; but the next runs may differ: read the run's warning above" if has_warnings else ""
    print(f"the same, bit by bit: {kills} kills, {kills} restarts{doubt}")
    return ExitCode.DONE


def _last_step(folder: Path) -> int:
    lines = files.read_json_lines(folder / "metrics.jsonl")
    steps = [int(line.get("step", 0)) for line in lines]
    return max(steps, default=0)


def _get_log_path(folder: Path) -> Path:
    """Returns the path of the newest process's output, next to the run's folder."""
    return folder.with_suffix(".log")


def _build_failure(code: int, folder: Path) -> DoctorError:
    log = _get_log_path(folder)
    lines = log.read_text(errors="replace").splitlines()
    last_lines = "\n  ".join(lines[-_MAX_SHOWN_LINES:])
    return DoctorError(f"the run ended with exit code {code}; its last lines:\n  {last_lines}")
