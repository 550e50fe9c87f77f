"""A run under a supervisor and a sidecar beside it, under faults of all kinds, against a run that nothing happens to.

    scripts/soak.sh [MINUTES] [SEED] [--keep]

Faults: kill -9, SIGTERM (with SIGINT too) and SIGHUP of the trainer, kill -9 of the sidecar, and, while the trainer is
down, damage to its files (soak_faults.py). A full disk is not among them: its exit code, 6, ends the
supervisor by design.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf  # noqa: F401  some damages read a checkpoint: its import would take seconds with the lock held

from scripts.soak_faults import DAMAGES, STOPS, foreign_kept
from trainer_kit import files
from trainer_kit.run_lock import LOCK, read_heartbeat

STEPS_PER_MINUTE = 9000  # so many that training lasts about half the time; the other half goes into restarts
OVERRIDES = (
    "trainer.steps_per_loop=20,trainer.summary_interval=100,trainer.checkpoint_interval=200,trainer.max_to_keep=4,"
    "trainer.validation_interval=500,trainer.continuous_eval_timeout=3600,"
    "trainer.optimizer_config.ema.average_decay=0.99,task.model.dropout=0.2"
)
# trainer_kit.supervise with short waits: a soak has more crashes in an hour than a run has in a year.
SUPERVISED = """
import logging, sys
import trainer_kit
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, *command = sys.argv[1:]
sys.exit(trainer_kit.supervise(command, max_restarts=10**6, log_dir=folder, most_backoff_seconds=1.0))
"""
_POLL_SECONDS = 0.05
_PATIENCE = 300.0  # seconds without progress after which the soak gives up


@dataclass
class Soak:
    """What runs, and what has happened.

    Attributes:
      base: the folder of it all.
      steps: that the run has to take.
      chance: decides on everything.
      faults: how many there were, by kind.
      oddities: ends of processes that no fault explains.
    """

    base: Path
    steps: int
    chance: random.Random
    begin: float = field(default_factory=time.monotonic)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    oddities: list[str] = field(default_factory=list)
    sidecar: subprocess.Popen[bytes] | None = None
    sidecar_starts: int = 0

    @property
    def run(self) -> Path:
        """The folder of the run that has the faults."""
        return self.base / "run"

    def log(self, kind: str, what: str) -> None:
        """Prints a fault, with its moment, and counts it."""
        self.faults[kind] += 1
        print(f"{time.monotonic() - self.begin:7.1f} s  step {step_reached(self.run):>7}  {kind}: {what}", flush=True)


def main() -> int:
    """Runs the soak; returns 0 when nothing differs and nobody had to help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=20.0)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folders when all is well, too")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="trainer_kit_soak_"))
    soak = Soak(base, int(arguments.minutes * STEPS_PER_MINUTE), random.Random(arguments.seed))
    print(f"{soak.steps} steps in {base}; seed {arguments.seed}", flush=True)
    code = _run_with_faults(soak, arguments.minutes * 60)
    ended_well = _judge(soak, code)
    if ended_well and not arguments.keep:
        shutil.rmtree(base, ignore_errors=True)
    else:
        print(f"kept: {base}")
    return 0 if ended_well else 1


def step_reached(run: Path) -> int:
    """Returns the step of the last line of the history; 0 if there is none."""
    with contextlib.suppress(OSError), open(run / "metrics.jsonl", "rb") as stream:
        stream.seek(max(os.fstat(stream.fileno()).st_size - 4096, 0))
        steps = re.findall(rb'"step": (\d+)', stream.read())
        return int(steps[-1]) if steps else 0
    return 0


def _command(soak: Soak, mode: str, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "trainer_kit.train", "--experiment=digits_mlp", f"--mode={mode}",
        f"--model_dir={folder}", f"--params_override=trainer.train_steps={soak.steps},{OVERRIDES}",
    ]  # fmt: skip


def _start(soak: Soak, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with open(soak.base / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _run_with_faults(soak: Soak, seconds: float) -> int | None:
    """Trains to the end, with faults for so long; returns the supervisor's exit code, None if it hangs."""
    command = _command(soak, "train_and_eval", soak.run)
    supervisor = _start(soak, "run", [sys.executable, "-c", SUPERVISED, str(soak.run), *command])
    try:
        while time.monotonic() - soak.begin < seconds and _progress(soak, supervisor):
            _fault(soak, supervisor)
        return _wait_for_end(soak, supervisor)
    finally:
        for process in filter(None, (supervisor, soak.sidecar)):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            process.kill()


def _progress(soak: Soak, supervisor: subprocess.Popen[bytes]) -> bool:
    """Returns True when the trainer is alive and past the heartbeat of now; False when the run has ended, or hangs.

    A supervisor takes a second crash at the same heartbeat's step for one that will come again, and ends.
    """
    begin, known = time.monotonic(), (read_heartbeat(soak.run) or {}).get("step", 0)
    told: object = None
    while supervisor.poll() is None:
        _keep_sidecar(soak)
        heartbeat = read_heartbeat(soak.run) or {}
        if heartbeat.get("step", 0) > known and not heartbeat.get("ended") and _alive(heartbeat["pid"]):
            return True
        if heartbeat.get("step", 0) != told:
            told, begin = heartbeat.get("step", 0), time.monotonic()
        if time.monotonic() - begin > _PATIENCE:
            soak.oddities.append(f"no progress for {_PATIENCE:g} s at step {known}")
            return False
        time.sleep(_POLL_SECONDS)
    return False


def _fault(soak: Soak, supervisor: subprocess.Popen[bytes]) -> None:
    """One fault, or several at once, after a random while."""
    end = time.monotonic() + soak.chance.uniform(0, 5)
    while time.monotonic() < end and supervisor.poll() is None:
        time.sleep(_POLL_SECONDS)
    kind = soak.chance.choices(["kill", "term", "sidecar", "damage"], [2, 2, 1, 6])[0]
    if kind == "sidecar":
        if soak.sidecar is not None and soak.sidecar.poll() is None:
            soak.sidecar.kill()
            soak.sidecar.wait()
            soak.log("sidecar killed", f"pid {soak.sidecar.pid}")
            soak.sidecar = None
        return
    heartbeat = read_heartbeat(soak.run) or {}
    pid = int(heartbeat.get("pid", 0))
    if not pid or heartbeat.get("ended") or supervisor.poll() is not None:
        return
    numbers = soak.chance.choice(STOPS) if kind == "term" else (signal.SIGKILL,)
    with contextlib.suppress(ProcessLookupError):
        for number in numbers:
            os.kill(pid, number)
        soak.log(f"trainer {' and '.join(number.name for number in numbers)}", f"pid {pid}")
    if kind == "damage":
        _damage(soak, pid)


def _damage(soak: Soak, pid: int) -> None:
    """Hurts the files of the trainer that was killed, with its lock held: no trainer is there meanwhile."""
    while _alive(pid):
        time.sleep(_POLL_SECONDS / 10)
    with open(soak.run / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # the next one is there already
        for name in soak.chance.sample(sorted(DAMAGES), soak.chance.choice([1, 1, 2])):
            if what := DAMAGES[name](soak.run, soak.chance):
                soak.log(name, what)


def _keep_sidecar(soak: Soak) -> None:
    """Starts the sidecar, and again when it has died, as whatever runs it would."""
    if soak.sidecar is not None and (code := soak.sidecar.poll()) is None:
        return
    if soak.sidecar is not None and code:
        soak.oddities.append(f"the sidecar ended with exit code {code}")
    soak.sidecar_starts += 1
    soak.sidecar = _start(soak, "sidecar", _command(soak, "continuous_eval", soak.run))


def _wait_for_end(soak: Soak, supervisor: subprocess.Popen[bytes]) -> int | None:
    print(f"{time.monotonic() - soak.begin:7.1f} s  no more faults", flush=True)
    last, begin = -1, time.monotonic()
    while supervisor.poll() is None:
        _keep_sidecar(soak)
        if (now := step_reached(soak.run)) != last:
            last, begin = now, time.monotonic()
        if time.monotonic() - begin > _PATIENCE:
            soak.oddities.append(f"the run hangs at step {last}")
            return None
        time.sleep(_POLL_SECONDS)
    if supervisor.returncode == 0 and soak.sidecar is not None:
        try:
            if code := soak.sidecar.wait(_PATIENCE):
                soak.oddities.append(f"the sidecar ended with exit code {code}")
        except subprocess.TimeoutExpired:
            soak.oddities.append("the sidecar did not end with the run")
    return supervisor.returncode


def _judge(soak: Soak, code: int | None) -> bool:
    """Compares with a run that nothing happens to, and prints the table; returns whether all is well."""
    from trainer_kit.testing.comparison import compare_runs

    whole = soak.base / "uninterrupted"
    reference = _start(soak, "uninterrupted", _command(soak, "train_and_eval", whole)).wait()
    differences = [f"the uninterrupted run ended with exit code {reference}"] if reference else []
    differences += compare_runs(whole, soak.run) if code == 0 else []
    differences += _sidecar_differences(soak.run)
    if soak.faults["foreign checkpoint"] and not foreign_kept(soak.run):
        differences += ["the checkpoint of somebody else is gone"]
    attempts = list(files.read_lines(soak.run / "attempts.jsonl"))
    rows = {
        **{f"fault: {kind}": count for kind, count in sorted(soak.faults.items())},
        "faults": sum(soak.faults.values()),
        "restarts of the trainer": len(attempts) - 1,
        "restarts of the sidecar": soak.sidecar_starts - 1,
        "exit code": code,
        "human actions": int(code != 0),
        "ends that no fault explains": len(soak.oddities),
        "differences": len(differences),
        "silent failures": int(code == 0 and bool(differences)),
    }
    for name, value in rows.items():
        print(f"{name:<32} {value}")
    for line in (*soak.oddities, *differences):
        print(line)
    return code == 0 and not differences and not soak.oddities


def _sidecar_differences(run: Path) -> list[str]:
    """Where the sidecar has other numbers than the trainer for the same step, or a step twice.

    Its best so far is that of its own evaluations: it sees checkpoints that the trainer does not evaluate.
    """
    own, its = (list(files.read_lines(run / "evals" / f"{name}.jsonl")) for name in ("validation", "continuous_eval"))
    wanted = {record["step"]: record["metrics"] for record in own}
    counts = collections.Counter(record["step"] for record in its)
    twice = [f"sidecar: step {step} is {count} times in its ledger" for step, count in counts.items() if count > 1]
    others, best = [], 0.0
    for record in sorted(its, key=lambda record: int(record["step"])):
        step, metrics = record["step"], record["metrics"]
        best = max(best, metrics["accuracy"])
        right = {**wanted.get(step, metrics), "best_accuracy": best}
        if metrics != right:
            others += [f"sidecar: step {step}: {json.dumps(metrics)}, not {json.dumps(right)}"]
    return twice + others


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
