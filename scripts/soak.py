"""Compares a supervised run with a sidecar, under faults of all kinds, with an uninterrupted run.

    scripts/soak.sh [MINUTES] [SEED] [--keep]

Faults: kill -9, SIGTERM (with SIGINT too) and SIGHUP of the trainer, kill -9 of the sidecar, and,
while the trainer is down, damage to its files (soak_faults.py), or the loss of a file that it
cannot rebuild (soak_losses.py). The run's folder is also moved away and back: this ends the
supervisor with exit code 6, and the command is run again. A full disk is not among the faults.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tensorflow as tf  # noqa: F401  some damages read a checkpoint: its import would take seconds with the lock held

from scripts.soak_faults import ALONE, DAMAGES, STOPS, find_partial_saves, has_foreign_checkpoint
from scripts.soak_losses import WARNINGS, restore_lines
from scripts.soak_processes import PATIENCE, Soak, find_oddities, move_folder, read_last_step
from trainer_kit import files
from trainer_kit.errors import ExitCode
from trainer_kit.process.run_lock import LOCK, read_heartbeat

STEPS_PER_MINUTE = 70_000  # of two free cores, restarts included; a slower machine takes longer
FAULTS = {"kill": 2, "term": 3, "sidecar": 1, "damage": 7, "move": 1}  # and how often each comes
KINDS = {"sidecar killed", "folder moved", "trainer SIGKILL", *DAMAGES} | {
    f"trainer {' and '.join(number.name for number in numbers)}" for numbers in STOPS
}
_POLL_SECONDS = 0.05


def main() -> int:
    """Runs the soak; returns 0 when nothing differs and no help was needed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=20.0)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders even if the test passes"
    )
    arguments = parser.parse_args()
    # What nohup starts ignores SIGHUP, and what a shell starts in the background SIGINT; the
    # trainers must not.
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # goes no further than this process
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


def _run_with_faults(soak: Soak, seconds: float) -> int | None:
    """Trains to the end, with faults in the first `seconds`.

    Returns the supervisor's exit code, None if it hangs.
    """
    try:
        while time.monotonic() - soak.begin < seconds and _wait_for_progress(soak):
            _cause_fault(soak)
        return _wait_for_end(soak)
    finally:
        for process in filter(None, (soak.supervisor, soak.sidecar)):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            process.kill()


def _wait_for_progress(soak: Soak) -> bool:
    """Returns True once the trainer is alive and beyond its current heartbeat.

    False if the run has ended or hangs.
    """
    begin = time.monotonic()
    heartbeat = read_heartbeat(soak.run)
    known_step = 0 if heartbeat is None else heartbeat["step"]
    last_step = -1
    while soak.supervisor.poll() is None:
        soak.ensure_sidecar()
        heartbeat = read_heartbeat(soak.run)
        step = 0 if heartbeat is None else heartbeat["step"]
        if heartbeat is not None and step > known_step and not heartbeat["ended"]:
            if _is_alive(heartbeat["pid"]):
                return True
        if step != last_step:
            last_step = step
            begin = time.monotonic()
        if time.monotonic() - begin > PATIENCE:
            soak.oddities.append(f"no progress for {PATIENCE:g} s at step {known_step}")
            return False
        time.sleep(_POLL_SECONDS)
    return False


def _cause_fault(soak: Soak) -> None:
    """Causes a fault, or several at once, after a random time."""
    end = time.monotonic() + soak.chance.uniform(0, 5)
    while time.monotonic() < end and soak.supervisor.poll() is None:
        time.sleep(_POLL_SECONDS)
    kind = soak.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
    if kind == "sidecar":
        return soak.kill_sidecar()
    heartbeat = read_heartbeat(soak.run)
    if heartbeat is None or heartbeat["ended"] or soak.supervisor.poll() is not None:
        return None
    pid = heartbeat["pid"]
    if kind == "move":
        return move_folder(soak)
    numbers = soak.draw(STOPS) if kind == "term" else (signal.SIGKILL,)
    before = len(soak.read_attempts())
    with contextlib.suppress(ProcessLookupError):
        for number in numbers:
            os.kill(pid, number)
        soak.log(name := f"trainer {' and '.join(number.name for number in numbers)}", f"pid {pid}")
        if kind == "term":
            _check_stop(soak, name, before)
    return _damage(soak, pid) if kind == "damage" else None


def _check_stop(soak: Soak, name: str, attempts: int) -> None:
    """Waits for the end of a trainer that was asked to stop.

    Its exit code has to say that it saved.
    """
    begin = time.monotonic()
    while len(soak.read_attempts()) == attempts:
        if time.monotonic() - begin > PATIENCE:
            soak.oddities.append(f"{name}: the trainer did not stop")
            return
        time.sleep(_POLL_SECONDS)
    code = soak.read_attempts()[attempts]["exit_code"]
    if code not in (ExitCode.PREEMPTED, ExitCode.DONE):
        soak.oddities.append(f"{name}: the trainer ended with exit code {code}")


def _damage(soak: Soak, pid: int) -> None:
    """Damages the files of the killed trainer.

    It holds the lock of the run, so that no trainer starts meanwhile.
    """
    while _is_alive(pid):
        time.sleep(_POLL_SECONDS / 10)
    with open(soak.run / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # the next trainer has already started
        names = {soak.draw(list(DAMAGES)) for _ in range(soak.chance.choice([1, 1, 2]))}
        for name in sorted(names & ALONE)[:1] or sorted(names):
            if what := DAMAGES[name](soak.run, soak.chance):
                soak.log(name, what)
                if name in WARNINGS:
                    soak.expect(WARNINGS[name])


def _wait_for_end(soak: Soak) -> int | None:
    print(f"{time.monotonic() - soak.begin:7.1f} s  no more faults", flush=True)
    last = -1
    begin = time.monotonic()
    while soak.supervisor.poll() is None:
        soak.ensure_sidecar()
        if (now := read_last_step(soak.run)) != last:
            last = now
            begin = time.monotonic()
        if time.monotonic() - begin > PATIENCE:
            soak.oddities.append(f"the run hangs at step {last}")
            return None
        time.sleep(_POLL_SECONDS)
    if soak.supervisor.returncode == 0 and soak.sidecar is not None:
        try:
            if code := soak.sidecar.wait(PATIENCE):
                soak.oddities.append(f"the sidecar ended with exit code {code}")
        except subprocess.TimeoutExpired:
            soak.oddities.append("the sidecar did not end with the run")
    return soak.supervisor.returncode


def _judge(soak: Soak, code: int | None) -> bool:
    """Compares the run with an uninterrupted one, and prints the table.

    Returns whether the test passes.
    """
    from trainer_kit.evals.run_comparison import compare_runs

    whole = soak.base / "uninterrupted"
    reference = soak.start("uninterrupted.log", soak.build_command("train_and_eval", whole)).wait()
    restore_lines(soak.run)
    soak.oddities += (
        find_oddities(soak) if soak.faults else ["the run ended before the first fault"]
    )
    differences = [f"the uninterrupted run ended with exit code {reference}"] if reference else []
    differences += compare_runs(whole, soak.run) if code == 0 else []
    differences += _find_sidecar_differences(soak.run)
    if soak.faults["foreign checkpoint"] and not has_foreign_checkpoint(soak.run):
        differences += ["the foreign checkpoint is gone"]
    differences += [f"left over: {name}" for name in find_partial_saves(soak.run)]
    rows = {
        **{f"fault: {kind}": count for kind, count in sorted(soak.faults.items())},
        "faults": sum(soak.faults.values()),
        "kinds that did not occur": ", ".join(sorted(KINDS - soak.faults.keys())) or "none",
        "restarts of the trainer": len(soak.read_attempts()) - 1,
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


def _find_sidecar_differences(run: Path) -> list[str]:
    """Returns the steps at which the metrics of the sidecar are wrong.

    They differ from the trainer's, or the sidecar has them twice.
    """
    validation = files.read_json_lines(run / "evals" / "validation.jsonl")
    expected = {record["step"]: record["metrics"] for record in validation}
    records = list(files.read_json_lines(run / "evals" / "continuous_eval.jsonl"))

    counts = collections.Counter(record["step"] for record in records)
    differences = [
        f"sidecar: step {step} is {count} times in its ledger"
        for step, count in counts.items()
        if count > 1
    ]

    for record in records:
        step = record["step"]
        metrics = record["metrics"]
        # The sidecar also evaluates checkpoints that the trainer does not.
        if metrics != expected.get(step, metrics):
            differences.append(
                f"sidecar: step {step}: {json.dumps(metrics)}, not {json.dumps(expected[step])}"
            )
    return differences


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
