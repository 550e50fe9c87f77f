"""Times what a user waits for, ours and Model Garden's in turn, and samples memory; run it by bench_startup.sh.

Every figure is taken from outside, of whole processes: started by us, their output read through a pipe, unbuffered.
A mistake's time ends when the process does. The first step's ends when the first line `train | step N` with N above 0
arrives: both sides print it after the first loop, and a loop is one step here. Rounds go through all contenders in
turn, so that a slow minute of the machine hits each; one round that warms the disk cache does not count.

The two do not train the same: ours reads real digits into a small dense network; Model Garden's `mock` feeds zeros to
one dense unit, which is in its favour. `mock` has no optimizer of its own, so sgd is named for it. Resident memory is
VmRSS of /proc (Linux only), the median of five samples while the run goes on past the step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

OURS = ("-m", "trainer_kit.train", "--experiment=digits_mlp", "--mode=train")
PEER = ("-m", "official.nlp.train", "--experiment=mock", "--mode=train")
TRAINER_KIT = str(Path(sys.executable).with_name("trainer-kit"))
FIVE_STEPS = "--params_override=trainer.train_steps=5,trainer.steps_per_loop=1,trainer.summary_interval=1"
SGD = ",trainer.optimizer_config.optimizer.type=sgd,trainer.optimizer_config.learning_rate.type=constant"
MISTAKE = "--params_override=trainer.train_stepz=5"

STEP_LINE = re.compile(r"train \| step:? +([\d,]+)")
MEMORY_STEPS = (2_000, 20_000)
MEMORY_RUN = "--params_override=trainer.train_steps=21000,trainer.steps_per_loop=200,trainer.summary_interval=200"

Measure = Callable[[], float]


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--skip-memory", action="store_true", help="leave out the run of 21,000 steps")
    arguments = parser.parse_args()
    rows: dict[str, Measure] = {
        "config mistake until its message: ours": lambda: _until_exit(OURS, MISTAKE, expect=2),
        "config mistake until its message: Model Garden": lambda: _until_exit(PEER, MISTAKE, expect=1),
        "trainer-kit list": lambda: _timed([TRAINER_KIT, "list"], expect=0),
        "trainer-kit --help": lambda: _timed([TRAINER_KIT, "--help"], expect=0),
        "process start to first step: ours, digits_mlp": lambda: _until_first_step(OURS, FIVE_STEPS),
        "process start to first step: Model Garden, mock": lambda: _until_first_step(PEER, FIVE_STEPS + SGD),
    }
    medians = _print_times(rows, max(arguments.rounds, 1))
    mistake_ours, mistake_peer, _, _, first_ours, first_peer = medians
    print(f"\nours / Model Garden: mistake {mistake_ours / mistake_peer:.2f}, first step {first_ours / first_peer:.2f}")
    if not arguments.skip_memory:
        _print_memory()


def _print_times(rows: dict[str, Measure], rounds: int) -> list[float]:
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        print(f"round {number} of {rounds}" if number else "warming up", file=sys.stderr, flush=True)
        for name, measure in rows.items():
            seconds = measure()
            if number:
                taken[name].append(seconds)
    print(f"{f'seconds, {rounds} rounds':<52}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds_list in taken.items():
        print(f"{name:<52}{statistics.median(seconds_list):8.2f}{min(seconds_list):8.2f}{max(seconds_list):8.2f}")
    return [statistics.median(seconds_list) for seconds_list in taken.values()]


def _print_memory() -> None:
    early, late = _memory_at(MEMORY_STEPS)
    print(
        f"resident memory, ours, digits_mlp: {early:.1f} MiB after {MEMORY_STEPS[0]:,} steps, {late:.1f} MiB after "
        f"{MEMORY_STEPS[1]:,} ({100 * (late / early - 1):+.2f} %)"
    )


def _until_exit(program: Sequence[str], override: str, expect: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _timed([sys.executable, *program, f"--model_dir={folder}/run", override], expect)


def _timed(command: Sequence[str], expect: int) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode != expect:
        raise SystemExit(_failure(command, f"ended with {done.returncode}, not {expect}", done.stdout + done.stderr))
    return seconds


def _until_first_step(program: Sequence[str], override: str) -> float:
    begin = time.perf_counter()
    with _training(program, override) as (_, steps):
        for step in steps:
            if step > 0:
                return time.perf_counter() - begin
    raise AssertionError("unreachable: _training ends the script when no step comes")


def _memory_at(marks: Sequence[int], samples: int = 5) -> list[float]:
    """Returns MiB at each mark: the median of samples taken as the lines of that step and the next ones arrive."""
    taken: list[list[float]] = [[] for _ in marks]
    with _training(OURS, MEMORY_RUN) as (process, steps):
        for step in steps:
            for mark, values in zip(marks, taken, strict=True):
                if step >= mark and len(values) < samples:
                    values.append(_resident_mib(process.pid))
            if len(taken[-1]) == samples:
                break
    return [statistics.median(values) for values in taken]


@contextmanager
def _training(program: Sequence[str], override: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[int]]]:
    """Starts a training process; gives it and the steps that its output tells, as they come; ends it afterwards."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, *program, f"--model_dir={folder}/run", override]
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
    raise SystemExit(_failure(command, "ended too early", "".join(seen) + errors.read()))


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _failure(command: Sequence[str], what: str, output: str) -> str:
    last = "\n".join(output.splitlines()[-15:])
    return f"cannot measure: {' '.join(command)}\n{what}; the end of its output:\n{last}"


if __name__ == "__main__":
    main()
