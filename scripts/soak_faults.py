"""Damages that the soak test causes in a run's files while its trainer is down.

A restart survives all of them.

Each function takes the run's folder and a random generator, and returns a description of the
damage, or "" if it could not damage anything: at least one other complete checkpoint is always
left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from scripts.soak_losses import empty_history, empty_ledger
from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD_SUFFIX, complete_checkpoints, parse_step
from trainer_kit.checkpoints.commit import describe_damage, read_commit_record

Damage = Callable[[Path, random.Random], str]


def truncate_data(run: Path, chance: random.Random) -> str:
    """Cuts the newest checkpoint's data."""
    return _damage_newest(run, ".data-00000-of-00001", lambda path: _cut(path, chance))


def truncate_index(run: Path, chance: random.Random) -> str:
    """Cuts the newest checkpoint's index."""
    return _damage_newest(run, ".index", lambda path: _cut(path, chance))


def flip_bit(run: Path, chance: random.Random) -> str:
    """Flips one bit of the newest checkpoint's data; its record has the checksum."""
    prefix = _find_replaceable_checkpoint(run)
    if prefix is None or read_commit_record(prefix) is None:
        return ""
    return _damage_newest(run, ".data-00000-of-00001", lambda path: _flip(path, chance))


def remove_index(run: Path, chance: random.Random) -> str:
    """Removes the newest checkpoint's index."""
    del chance
    return _damage_newest(run, ".index", _remove)


def remove_data(run: Path, chance: random.Random) -> str:
    """Removes the newest checkpoint's data."""
    del chance
    return _damage_newest(run, ".data-00000-of-00001", _remove)


def remove_record(run: Path, chance: random.Random) -> str:
    """Removes the newest checkpoint's commit record; the checkpoint itself stays complete."""
    del chance
    return _damage_newest(run, RECORD_SUFFIX, _remove)


def tear_record(run: Path, chance: random.Random) -> str:
    """Cuts the newest checkpoint's commit record."""
    return _damage_newest(run, RECORD_SUFFIX, lambda path: _cut(path, chance))


def tear_pointer(run: Path, chance: random.Random) -> str:
    """Cuts TensorFlow's pointer file, empties it, or removes it."""
    pointer = run / "checkpoint"
    if not pointer.exists() or _find_newest_checkpoint(run) is None:
        return ""
    how = chance.choice(["cut", "empty", "missing"])
    if how == "cut":
        return f"checkpoint: {_cut(pointer, chance)}"
    pointer.unlink()
    if how == "empty":
        pointer.touch()
    return f"checkpoint: {how}"


def tear_best(run: Path, chance: random.Random) -> str:
    """Cuts info.json or removes it; the weights, their record and the ledger's line stay."""
    path = run / "best_ckpt" / "info.json"
    evaluated = {
        line.get("step") for line in files.read_json_lines(run / "evals" / "validation.jsonl")
    }
    weights = complete_checkpoints(str(path.parent)).items()
    whole = [
        step
        for step, prefix in weights
        if read_commit_record(prefix) and not describe_damage(prefix)
    ]
    if not path.exists() or not evaluated.issuperset(whole) or not whole:
        return ""
    if chance.random() < 0.5:
        return f"info.json: {_cut(path, chance)}"
    path.unlink()
    return "info.json: removed"


def tear_ledger(run: Path, chance: random.Random) -> str:
    """Cuts the ledger's last line, if a restart will repeat that evaluation."""
    path = run / "evals" / "validation.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    newest = _find_newest_checkpoint(run)
    if not lines or newest is None or not lines[-1].endswith(b"\n"):
        return ""
    step = json.loads(lines[-1])["step"]
    if parse_step(newest) > step:
        return ""
    kept = chance.randrange(1, len(lines[-1]) - 1)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    return f"validation.jsonl: the line of step {step} cut to {kept} bytes"


def tear_history(run: Path, chance: random.Random) -> str:
    """Cuts the last line of metrics.jsonl, if its step is after the newest checkpoint.

    The line comes again.
    """
    path = run / "metrics.jsonl"
    newest = _find_newest_checkpoint(run)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if (
        not lines
        or newest is None
        or not lines[-1].endswith(b"\n")
        or json.loads(lines[-1])["step"] <= parse_step(newest)
    ):
        return ""
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: chance.randrange(1, len(lines[-1]) - 1)])
    return "metrics.jsonl: the last line cut"


def tear_heartbeat(run: Path, chance: random.Random) -> str:
    """Cuts heartbeat.json."""
    path = run / "heartbeat.json"
    return f"heartbeat.json: {_cut(path, chance)}" if path.exists() else ""


def leave_debris(run: Path, chance: random.Random) -> str:
    """Leaves the temporary files of a process that dies while writing."""
    step = chance.randrange(10**6, 10**7)
    (run / f"ckpt-{step}_temp").mkdir()
    (run / f"ckpt-{step}_temp" / "part").write_bytes(b"half")
    (run / f".final.json.{step}.tmp").write_text("{")
    return f"ckpt-{step}_temp and a temporary file"


def leave_foreign(run: Path, chance: random.Random) -> str:
    """Adds a foreign checkpoint without a record.

    `has_foreign_checkpoint` looks for it at the end.
    """
    del chance
    prefix = _find_newest_checkpoint(run)
    if prefix is None or (run / "ckpt-7.index").exists():
        return ""
    for end in FOREIGN_FILES:
        shutil.copy(f"{prefix}{end}", run / f"ckpt-7{end}")
    return "foreign checkpoint ckpt-7"


def leave_partial_save(run: Path, chance: random.Random) -> str:
    """Leaves half of a killed removal: a temporary folder, and data without an index."""
    prefix = _find_newest_checkpoint(run)
    if prefix is None:
        return ""
    half = run / f"ckpt-{chance.randrange(10**6, 10**7)}"
    (run / f".saving-{half.name}").mkdir()
    shutil.copy(f"{prefix}{FOREIGN_FILES[1]}", f"{half}{FOREIGN_FILES[1]}")
    return f"{half.name}: data without an index"


def has_foreign_checkpoint(run: Path) -> bool:
    """Whether the checkpoint of `leave_foreign` is complete."""
    return describe_damage(str(run / "ckpt-7")) == ""


def find_partial_saves(run: Path) -> list[str]:
    """Returns the data files of checkpoints without an index, which killed saves have left."""
    names = {path.name for path in run.glob("ckpt-*")}
    return sorted(
        name
        for name in names
        if ".data-" in name and f"{name.partition('.')[0]}.index" not in names
    )


# Signals after which a trainer saves and is started again; launchers forward SIGTERM and SIGINT
# together.
STOPS: tuple[tuple[signal.Signals, ...], ...] = (
    (signal.SIGTERM,),
    (signal.SIGTERM, signal.SIGINT),
    (signal.SIGINT, signal.SIGTERM),
    (signal.SIGHUP,),
)
FOREIGN_FILES = (".index", ".data-00000-of-00001")
DAMAGES: dict[str, Damage] = {
    "data truncated": truncate_data,
    "index truncated": truncate_index,
    "bit flipped": flip_bit,
    "index removed": remove_index,
    "data removed": remove_data,
    "record removed": remove_record,
    "record torn": tear_record,
    "pointer torn": tear_pointer,
    "info.json torn": tear_best,
    "ledger torn": tear_ledger,
    "history torn": tear_history,
    "heartbeat torn": tear_heartbeat,
    "debris left": leave_debris,
    "foreign checkpoint": leave_foreign,
    "half of a save": leave_partial_save,
    "history emptied": empty_history,
    "ledger emptied": empty_ledger,
}
ALONE = {
    "history emptied",
    "ledger emptied",
}  # they need the newest checkpoint, which records what they remove


def _find_newest_checkpoint(run: Path) -> str | None:
    """Returns the newest complete checkpoint."""
    return next(
        (
            path
            for path in reversed(complete_checkpoints(str(run)).values())
            if not describe_damage(path)
        ),
        None,
    )


def _find_replaceable_checkpoint(run: Path) -> str | None:
    """Returns the newest complete checkpoint, if an older one is complete too."""
    whole = [
        path
        for step, path in complete_checkpoints(str(run)).items()
        if step != 7 and not describe_damage(path)
    ]
    return whole[-1] if len(whole) > 1 else None


def _damage_newest(run: Path, ending: str, damage: Callable[[Path], str]) -> str:
    prefix = _find_replaceable_checkpoint(run)
    if prefix is None or not os.path.exists(prefix + ending):
        return ""
    return f"{os.path.basename(prefix)}{ending}: {damage(Path(prefix + ending))}"


def _cut(path: Path, chance: random.Random) -> str:
    size = path.stat().st_size
    kept = chance.randrange(0, max(size - 1, 1))
    os.truncate(path, kept)
    return f"cut from {size} to {kept} bytes"


def _remove(path: Path) -> str:
    path.unlink()
    return "removed"


def _flip(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    bit = chance.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} flipped"
