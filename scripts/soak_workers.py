"""Kills either of two supervised workers repeatedly, then compares with an uninterrupted run.

    python -m scripts.soak_workers [KILLS=5] [SEED=0]

Each worker has its own supervisor. The supervisors restart both the killed worker and the other
one, without help. Exit code 0: the run ends with the same bits as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.soak_processes import read_last_step
from trainer_kit.testing import compare_runs

STEPS_PER_KILL = 400
SPARE_STEPS = 600
OVERRIDES = (
    "trainer.steps_per_loop=20,trainer.summary_interval=100,trainer.checkpoint_interval=50,trainer.max_to_keep=4,"
    "trainer.validation_interval=100,task.model.dropout=0.2,runtime.distribution_strategy=multi_worker_mirrored"
)
_POLL_SECONDS = 0.05
_PATIENCE = 180.0  # seconds without progress after which the soak gives up


def main() -> int:
    """Runs the soak; returns 0 when nothing differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kills", type=int, nargs="?", default=5)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="trainer_kit_soak_workers_"))
    hosts = _free_hosts()
    steps = arguments.kills * STEPS_PER_KILL + SPARE_STEPS
    print(f"{steps} steps in {base}; {arguments.kills} kills, seed {arguments.seed}", flush=True)
    supervisors = _start_all(base / "hit", hosts, steps)
    _kill_workers(base / "hit", supervisors, arguments.kills, random.Random(arguments.seed))
    codes = _wait_for_exit_codes(base / "hit", supervisors)
    whole = _wait_for_exit_codes(base / "whole", _start_all(base / "whole", hosts, steps))
    wrong = [] if codes == whole == [0, 0] else [f"exit codes: {codes}, and without kills {whole}"]
    wrong += wrong or compare_runs(base / "whole", base / "hit")
    print("\n".join(wrong) or "nothing differs", flush=True)
    if not wrong:
        shutil.rmtree(base)
    return 1 if wrong else 0


def _start_all(folder: Path, hosts: str, steps: int) -> list[subprocess.Popen[bytes]]:
    """Starts both supervisors, with commands that differ in the worker's index only."""
    return [
        _start_supervisor(
            folder, index, f"trainer.train_steps={steps},{OVERRIDES},runtime.worker_hosts='{hosts}'"
        )
        for index in (0, 1)
    ]


def _start_supervisor(folder: Path, index: int, overrides: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "trainer_kit.train",
        "--experiment=digits_mlp",
        "--mode=train_and_eval",
        f"--model_dir={folder}",
        f"--params_override={overrides},runtime.task_index={index}",
        f"--max_restarts={10**6}",
    ]
    with open(folder.parent / f"{folder.name}_worker_{index}.txt", "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _kill_workers(
    folder: Path, supervisors: Sequence[subprocess.Popen[bytes]], kills: int, chance: random.Random
) -> None:
    """Kills one of the two workers `kills` times, each time after some steps."""
    begin = time.monotonic()
    for number in range(kills):
        target = read_last_step(folder) + chance.randrange(60, STEPS_PER_KILL)
        if not _wait_for_step(folder, supervisors, target):
            print(f"kill {number + 1} is skipped: the run has ended, or hangs", flush=True)
            return
        time.sleep(chance.uniform(0, 0.3))  # anywhere in a loop, a save or an evaluation
        index = number % 2 if number < 2 else chance.randrange(2)
        pid = _find_worker_pid(supervisors[index])
        if pid is None:
            continue
        os.kill(pid, signal.SIGKILL)
        seconds = time.monotonic() - begin
        print(
            f"{seconds:7.1f} s  step {read_last_step(folder):>6}  kill -9 of worker {index}",
            flush=True,
        )


def _wait_for_step(folder: Path, supervisors: Sequence[subprocess.Popen[bytes]], step: int) -> bool:
    """Waits for `step`; returns False when the run ends earlier or makes no progress."""
    last_step = read_last_step(folder)
    since = time.monotonic()
    while (
        last_step < step and time.monotonic() - since < _PATIENCE and supervisors[0].poll() is None
    ):
        time.sleep(_POLL_SECONDS)
        if (now := read_last_step(folder)) != last_step:
            last_step = now
            since = time.monotonic()
    return last_step >= step


def _find_worker_pid(supervisor: subprocess.Popen[bytes]) -> int | None:
    """Returns the process id of a supervisor's worker; None between two attempts."""
    for child in Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"trainer_kit.train" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def _wait_for_exit_codes(
    folder: Path, supervisors: Sequence[subprocess.Popen[bytes]]
) -> list[int | None]:
    """Waits for both supervisors and returns their exit codes.

    One that makes no progress is terminated.
    """
    _wait_for_step(folder, supervisors, sys.maxsize)
    for supervisor in supervisors:
        try:
            supervisor.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            supervisor.terminate()
    return [supervisor.poll() for supervisor in supervisors]


def _free_hosts() -> str:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    hosts = ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets)
    for listener in sockets:
        listener.close()
    return hosts


if __name__ == "__main__":
    sys.exit(main())
