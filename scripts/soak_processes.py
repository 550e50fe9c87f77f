"""The processes of the soak test: a supervised trainer and a sidecar, whose folder is moved."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainer_kit import files
from trainer_kit.errors import ExitCode
from trainer_kit.process.run_lock import read_heartbeat

OVERRIDES = (
    "trainer.steps_per_loop=20,trainer.summary_interval=100,trainer.checkpoint_interval=200,trainer.max_to_keep=4,"
    "trainer.validation_interval=500,trainer.continuous_eval_timeout=3600,"
    "trainer.optimizer_config.ema.average_decay=0.99,task.model.dropout=0.2"
)
# trainer_kit.supervise with short waits: a soak has more crashes in an hour than a usual run in a
# year.
SUPERVISED = """
import logging, sys
import trainer_kit
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, *command = sys.argv[1:]
sys.exit(
    trainer_kit.supervise(command, max_restarts=10**6, log_dir=folder, max_backoff_seconds=1.0)
)
"""
_Kind = TypeVar("_Kind")
PATIENCE = 300.0  # seconds without progress after which the soak gives up
MOVED = "was moved or removed during the run"
_RUN_LOG = "run.log"
_SIDECAR_LOG = "sidecar.log"
_EXPLAINED = (
    ExitCode.DONE,
    ExitCode.PREEMPTED,
    -9,
)  # ends of a trainer: stopped with a save, or killed


@dataclass
class Soak:
    """The processes of the soak test, and a record of what has happened.

    Attributes:
      base: The folder of the whole test.
      steps: The number of training steps.
      chance: The random generator of all decisions.
      faults: The number of faults by kind.
      oddities: Events that no fault explains.
      expected: Pairs of a size of the trainer's log and a text that it has to print after that.
    """

    base: Path
    steps: int
    chance: random.Random
    begin: float = field(default_factory=time.monotonic)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    oddities: list[str] = field(default_factory=list)
    expected: list[tuple[int, str]] = field(default_factory=list)
    sidecar: subprocess.Popen[bytes] | None = None
    sidecar_starts: int = 0
    _decks: dict[Any, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.supervisor = self.start_supervisor()

    @property
    def run(self) -> Path:
        """The folder of the run that has the faults."""
        return self.base / "run"

    def log(self, kind: str, what: str) -> None:
        """Prints a fault with its time, and counts it."""
        self.faults[kind] += 1
        print(
            f"{time.monotonic() - self.begin:7.1f} s  step {read_last_step(self.run):>7}  {kind}:"
            f" {what}",
            flush=True,
        )

    def draw(self, kinds: Sequence[_Kind]) -> _Kind:
        """Returns a random kind; each kind comes once before any is repeated."""
        deck = self._decks.setdefault(tuple(kinds), [])
        if not deck:
            deck += self.chance.sample(kinds, len(kinds))
        kind: _Kind = deck.pop()
        return kind

    def build_command(self, mode: str, folder: Path) -> list[str]:
        """Returns the command that trains or evaluates in a folder."""
        return [
            sys.executable,
            "-m",
            "trainer_kit.train",
            "--experiment=digits_mlp",
            f"--mode={mode}",
            f"--model_dir={folder}",
            f"--params_override=trainer.train_steps={self.steps},{OVERRIDES}",
        ]

    def start(self, log: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a command that prints into a file."""
        with open(self.base / log, "ab") as stream:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def start_supervisor(self) -> subprocess.Popen[bytes]:
        """Starts the supervisor, which starts the trainer."""
        command = self.build_command("train_and_eval", self.run)
        return self.start(_RUN_LOG, [sys.executable, "-c", SUPERVISED, str(self.run), *command])

    def ensure_sidecar(self) -> None:
        """Starts the sidecar, or restarts it if it has died."""
        if self.sidecar is not None and (code := self.sidecar.poll()) is None:
            return
        if self.sidecar is not None and code:
            self.oddities.append(f"the sidecar ended with exit code {code}")
        self.sidecar_starts += 1
        self.sidecar = self.start(_SIDECAR_LOG, self.build_command("continuous_eval", self.run))

    def kill_sidecar(self) -> None:
        """Kills the sidecar if it runs."""
        if self.sidecar is not None and self.sidecar.poll() is None:
            self.sidecar.kill()
            self.sidecar.wait()
            self.log("sidecar killed", f"pid {self.sidecar.pid}")
            self.sidecar = None

    def read_attempts(self) -> list[dict[str, Any]]:
        """Returns the supervisor's records of the attempts that have ended."""
        return list(files.read_json_lines(self.run / "attempts.jsonl"))

    def expect(self, text: str) -> None:
        """Notes a text that the trainer has to print from now on."""
        self.expected.append(
            (log.stat().st_size if (log := self.base / _RUN_LOG).exists() else 0, text)
        )


def read_last_step(run: Path) -> int:
    """Returns the step of the last line of metrics.jsonl; 0 if there is none."""
    with contextlib.suppress(OSError), open(run / "metrics.jsonl", "rb") as stream:
        stream.seek(max(os.fstat(stream.fileno()).st_size - 4096, 0))
        steps = re.findall(rb'"step": (\d+)', stream.read())
        return int(steps[-1]) if steps else 0
    return 0


def move_folder(soak: Soak) -> None:
    """Moves the run's folder while it is in use, and back when all processes have ended.

    Then it restarts the run.

    The supervisor, and the sidecar if it has begun, have to end with exit code 6 and the reason,
    and must not leave anything at the old path.
    """
    lease = read_heartbeat(soak.run / "evals", "continuous_eval.lease.json")
    if soak.sidecar is None or lease is None or lease["pid"] != soak.sidecar.pid:
        soak.kill_sidecar()  # it would start at the old path
    elsewhere = soak.base / "moved"
    soak.log("folder moved", elsewhere.name)
    soak.expect(MOVED)
    soak.run.rename(elsewhere)
    code = _wait_for_exit(soak, "supervisor", soak.supervisor)
    beside = _wait_for_exit(soak, "sidecar", soak.sidecar) if soak.sidecar is not None else None
    if soak.run.exists():
        written = sorted(os.listdir(soak.run))
        soak.oddities.append(
            f"after the folder was moved, something was written at its old path: {written}"
        )
        soak.run.rename(soak.base / f"second_half_{len(soak.oddities)}")
    elsewhere.rename(soak.run)
    if code == ExitCode.DONE:  # the last write came before the move
        soak.expected.pop()
        return
    if code != ExitCode.STORAGE or beside not in (None, ExitCode.STORAGE, ExitCode.DONE):
        soak.oddities.append(
            f"after the folder was moved, the exit code was {code}, and the sidecar's {beside}"
        )
    soak.sidecar = None
    soak.supervisor = soak.start_supervisor()


def _wait_for_exit(soak: Soak, what: str, process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        soak.oddities.append(f"after the folder was moved, the {what} did not end")
        process.kill()
        return process.wait()


def find_oddities(soak: Soak) -> list[str]:
    """Returns events in logs and attempts.jsonl that no fault explains.

    It also returns expected warnings that are missing.
    """
    text = (soak.base / _RUN_LOG).read_bytes()
    places = [*(place for place, _ in soak.expected), len(text)]
    odd = [
        f"the trainer did not print {wanted!r} after byte {begin} of {_RUN_LOG}"
        for (begin, wanted), end in zip(soak.expected, places[1:], strict=True)
        if wanted.encode() not in text[begin:end]
    ]
    for name in (_RUN_LOG, _SIDECAR_LOG):
        for sign in (b"Traceback (most recent call last)", b"gave other metrics", b"left at once"):
            if sign in (soak.base / name).read_bytes():
                odd.append(f"{name} has a line with {sign.decode()!r}")
    wrong = [
        attempt["exit_code"]
        for attempt in soak.read_attempts()
        if attempt["exit_code"] not in _EXPLAINED
    ]
    return odd + [f"an attempt of the trainer ended with exit code {code}" for code in wrong]
