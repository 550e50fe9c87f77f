"""The batch script of `trainer-kit render slurm`, run by bash, with small programs in place of srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer_kit.cli.manifests import job, slurm

# Prints a line, and ends like a preempted run when it is asked to stop.
_SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


def _counting(folder: Path, code: int) -> tuple[str, ...]:
    """Returns a command that counts its starts and ends with `code`."""
    return ("sh", "-c", f"echo started >> {folder}/starts; exit {code}")


class Slurm:
    """The commands srun and scontrol in a folder: srun runs its command, scontrol writes down what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, folder / "told"
        for name, text in (
            ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"'),
            ("scontrol", f'echo "$@" >> {self.told}'),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    def start(self, script: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Starts a batch script as a job with this number of restarts behind it."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        more = {"PATH": path, "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", "-c", script], env={**os.environ, **more}, stdout=subprocess.PIPE)

    def requeued(self) -> bool:
        """Whether the job was put back into the queue."""
        return self.told.exists() and self.told.read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (3, 0, False), (5, 0, False), (75, 99, True), (7, 3, True), (1, 4, False)],
)
def test_slurm_requeues_as_the_code_says(code: int, restarts: int, again: bool, tmp_path: Path) -> None:
    cluster, script = (
        Slurm(tmp_path),
        slurm.render(job.Job("mine", _counting(tmp_path, code), "runs/mine", "runs/mine")),
    )
    assert cluster.start(script, restarts).wait(20) == code
    assert cluster.requeued() == again


def test_slurm_lets_a_run_save_before_its_time_ends(tmp_path: Path) -> None:
    mine = job.Job("mine", (sys.executable, "-c", _SAVES), "runs/mine", "runs/mine", {"fast": ("sleep", "60")})
    cluster, begin = Slurm(tmp_path), time.monotonic()
    with cluster.start(slurm.render(mine)) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 75  # and the sidecar has ended
    assert cluster.requeued() and time.monotonic() - begin < 30


def test_slurm_waits_for_the_sidecar_of_a_finished_run(tmp_path: Path) -> None:
    sidecar = ("sh", "-c", f"sleep 0.3; touch {tmp_path}/evaluated")
    mine = job.Job("mine", ("true",), "runs/mine", "runs/mine", {"fast": sidecar})
    assert Slurm(tmp_path).start(slurm.render(mine)).wait(20) == 0
    assert (tmp_path / "evaluated").exists()


def test_a_command_survives_the_shell(tmp_path: Path) -> None:
    odd = ("printf", "%s\\n", "--a=it's $HOME", '--b="x"', "--c=\\d", "--d={n}")
    output = (
        Slurm(tmp_path).start(slurm.render(job.Job("mine", odd, "/runs/mine", "/runs/mine"))).communicate(timeout=20)[0]
    )
    assert output.decode().splitlines() == list(odd[2:])
