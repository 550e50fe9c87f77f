"""Scans model_dir when a trainer starts: finds the checkpoint to resume from, removes the debris of dead processes.

Nothing here is silent. Damaged checkpoints are moved to `damaged/` with a warning once an older whole checkpoint is
found; without one the run does not start, since it would start from step 0. Files of other programs are not touched.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shutil
from collections.abc import Iterable

from trainer_kit import files
from trainer_kit.checkpoint_names import (
    ITERATOR,
    POINTER,
    RECORD,
    UNFINISHED,
    complete_checkpoints,
    own_files,
    owner,
    pointer_text,
    require_step,
    step_of,
)
from trainer_kit.checkpoints.commit import commit, is_foreign, is_own, problem, read_record
from trainer_kit.checkpoints.unfinished import mark, marked, unmark
from trainer_kit.errors import StorageError, UsageError

DAMAGED, DIVERGED, ARCHIVED, FOREIGN = "damaged", "diverged", "archived", "foreign"
_NOTE = "going_back.json"
_LOG = logging.getLogger(__name__)


def remove_debris(directory: str, run_id: str = "") -> None:
    """Removes the debris of a process that died during a save: `*_temp` folders, `*.tmp` files, incomplete checkpoints.

    A whole checkpoint that is still marked as unfinished (unfinished.py) gets its commit record.
    Only the trainer that holds the folder's lock may call this.

    Args:
      directory: The folder of the checkpoints.
      run_id: The run's identity. The saves of a run with an identity leave marks, so incomplete checkpoints with
        neither a mark nor a `*_temp` folder belong to others and stay.
    """
    if not os.path.isdir(directory):
        return
    names = sorted(os.listdir(directory))
    unfinished = {name.removesuffix("_temp") for name in names if UNFINISHED.fullmatch(name)}
    marks = marked(names, run_id)
    begun = unfinished | marks.keys()
    halves = _halves(names, begun, set(_pointed(directory)))
    halves = halves & begun if run_id else halves
    halves |= {name for name in begun if _is_cut_short(os.path.join(directory, name))}
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith("_temp") and name.removesuffix("_temp") in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.isfile(path) and (_is_temporary(name) or owner(name) in halves):
            os.remove(path)
    for checkpoint, name in marks.items():
        prefix = os.path.join(directory, checkpoint)
        if checkpoint not in halves and os.path.exists(f"{prefix}.index") and read_record(prefix) is None:
            commit(prefix, **_identity(run_id))
        os.remove(os.path.join(directory, name))
    for folder in (ARCHIVED, DIVERGED):  # a process may have died when it had moved a checkpoint, and not yet pointed
        top = os.path.join(directory, folder)
        for place in (top, *glob.glob(os.path.join(glob.escape(top), "*", ""))):
            _point_to_newest(place)


def remove_unfinished(prefix: str) -> None:
    """Removes the files of a failed save of the checkpoint `prefix`, unless it has a record and so is whole."""
    for folder in (f"{prefix}_temp", *glob.glob(f"{glob.escape(prefix + ITERATOR)}*_temp")):
        shutil.rmtree(folder, ignore_errors=True)
    pointers = glob.glob(os.path.join(glob.escape(os.path.dirname(prefix)), f"{POINTER}.tmp*"))
    parts = [] if os.path.exists(prefix + RECORD) else own_files(prefix)
    for path in [*parts, *filter(lambda path: _is_temporary(os.path.basename(path)), pointers)]:
        with contextlib.suppress(OSError):
            os.remove(path)


def remove_saved(directory: str, keep: int, run_id: str = "") -> None:
    """Removes all but the `keep` newest checkpoints of a finished run; pinned ones stay.

    Only checkpoints with a record of this run are counted and removed. Each leaves the pointer file first.
    """
    there = [prefix for prefix in complete_checkpoints(directory).values() if is_own(prefix, run_id)]
    for prefix in there[: len(there) - keep]:
        if not os.path.exists(f"{prefix}.pin"):
            _unpoint(prefix)
            remove_checkpoint(prefix, run_id)


def remove_checkpoint(prefix: str, run_id: str = "") -> None:
    """Removes the files of a checkpoint of this run, its record first.

    A mark shows that files left by a crash are neither a damaged checkpoint nor somebody else's.
    """
    mark([prefix], run_id)
    for path in sorted(own_files(prefix), key=lambda path: (not path.endswith(RECORD), ".data-" in path)):
        files.reach("checkpoint.remove", path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    unmark([prefix], run_id)


def make_room(prefix: str, run_id: str) -> None:
    """Moves files of another run to `foreign/`, if they have the name of the checkpoint that is saved next.

    Raises:
      StorageError: when they cannot be moved.
    """
    if own_files(prefix) and not is_own(prefix, run_id):
        moved = set_aside(prefix, FOREIGN)
        _LOG.warning("%s already existed, but this run did not save it; it was moved to %s", prefix, moved)


def _identity(run_id: str) -> dict[str, str]:
    """Returns the entries of a record that identify the run."""
    return {"run_id": run_id} if run_id else {}


def not_written(what: str, folder: str, error: Exception | None) -> StorageError:
    """Returns the error for a failed write: `what` failed, why, and how much space `folder` has."""
    if not os.path.isdir(folder) or "Permission denied" in _reason(error):
        return StorageError(f"{what}: {_reason(error)}; give a writable folder")
    return StorageError(
        f"{what}: {_reason(error)} ({shutil.disk_usage(folder).free:,} bytes are free there); free some space, then "
        "run the same command again: it resumes from the newest whole checkpoint"
    )


def _reason(error: Exception | None) -> str:
    text = str(getattr(error, "message", None) or getattr(error, "strerror", None) or error or "")
    first = re.sub(r"\{\{.*?\}\} ?|\[Op:\w+\]", "", text).strip().partition("\n")[0]
    return first or "the reason is not known; is the disk full?"


def _is_temporary(name: str) -> bool:
    """Whether this is a half-written file of files.py, or TensorFlow's half-written pointer file.

    With this process's id only files of checkpoints count: another thread may be writing the heartbeat.
    """
    if match := re.fullmatch(r"\.(.+)\.(\d+)\.tmp", name):
        return int(match.group(2)) != os.getpid() or owner(match.group(1)) is not None
    return re.fullmatch(POINTER + r"\.tmp[0-9a-f]{32}", name) is not None


def _halves(names: Iterable[str], unfinished: set[str], pointed: set[str]) -> set[str]:
    """Returns the checkpoints whose save or rotation was interrupted.

    TensorFlow renames the index into place last; until then its temporary folder exists. Rotation first takes a
    checkpoint out of the pointer file and removes its record. So a whole checkpoint that lost its index still has a
    record or is in the pointer file, and is not returned.
    """
    there: dict[str, list[str]] = {}
    for name in names:
        if checkpoint := owner(name):
            there.setdefault(checkpoint, []).append(name.removeprefix(f"{checkpoint}."))
    return {
        checkpoint
        for checkpoint, kinds in there.items()
        if not {"index", "commit.json"} & set(kinds)
        and (
            checkpoint in unfinished
            or (pointed and checkpoint not in pointed)
            or not any(kind.startswith("data-") for kind in kinds)
        )
    }


def _is_cut_short(prefix: str) -> bool:
    """Whether the save of `prefix`, whose temporary folder is still there, ended while TensorFlow wrote the index."""
    return os.path.exists(f"{prefix}.index") and not os.path.exists(prefix + RECORD) and problem(prefix) != ""


def newest_whole(directory: str, run_id: str = "") -> str | None:
    """Returns the prefix of the newest whole checkpoint; None when none was ever saved. Repairs the pointer file.

    Newer damaged checkpoints are moved to `damaged/`, and those with a record of another run to `foreign/`.

    Raises:
      StorageError: when checkpoints were saved, but none is both whole and possibly of this run.
    """
    damaged: dict[str, str] = {}
    foreign: set[str] = set()
    for prefix in reversed(_ever_saved(directory)):
        if is_foreign(prefix, run_id):
            foreign.add(prefix)
            damaged[prefix] = "another run saved it"
        elif not (wrong := problem(prefix)):
            for other, reason in damaged.items():
                moved = set_aside(other, FOREIGN if other in foreign else DAMAGED)
                what = "does not belong to this run" if other in foreign else "is damaged"
                _LOG.warning("%s %s: %s; it was moved to %s, and %s is used", other, what, reason, moved, prefix)
            if not os.path.exists(prefix + RECORD):
                _LOG.info("%s has no record of its checksums; it was read completely instead and is whole", prefix)
            elif read_record(prefix) is None:
                _record_again(prefix, run_id)
            _point_to(directory, prefix)
            return prefix
        else:
            damaged[prefix] = wrong
    if damaged and foreign == damaged.keys():
        raise StorageError(
            f"the checkpoints in {directory} belong to another run "
            f"({', '.join(map(os.path.basename, sorted(foreign)))}): the run_id in their records differs from that in "
            "manifest.json; move them away, or copy them to a folder of their own and resume from them there"
        )
    if damaged:
        reasons = "; ".join(f"{os.path.basename(prefix)}: {reason}" for prefix, reason in list(damaged.items())[:3])
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise StorageError(
            f"no checkpoint in {directory} is whole ({reasons}{more}); restore one from a backup, or start again from "
            "step 0 with --from_step=0, which moves the existing files to archived/"
        )
    return None


def _record_again(prefix: str, run_id: str) -> None:
    """Replaces a damaged record of a whole checkpoint: without a record, rotation would never remove it."""
    try:
        commit(prefix, **_identity(run_id))
        _LOG.info("%s was damaged; its checkpoint was read and is whole, so the record was replaced", prefix + RECORD)
    except (OSError, StorageError) as error:
        _LOG.warning("%s is damaged and could not be replaced: %s", prefix + RECORD, error)


def check_from_step(directory: str, step: int, run_id: str = "") -> str | None:
    """Returns the prefix of the checkpoint that --from_step names; None for step 0.

    Raises:
      UsageError: when there is no checkpoint of that step, or it is damaged, or another run saved it.
    """
    if step == 0:
        return None
    there = {step_of(prefix): prefix for prefix in _ever_saved(directory)}
    require_step(step, there)
    if is_foreign(there[step], run_id):
        raise UsageError(
            f"--from_step: another run saved {there[step]}: the run_id in its record differs from that in "
            "manifest.json; give another step, or copy it to a folder of its own and resume from it there"
        )
    if wrong := problem(there[step]):
        raise UsageError(f"--from_step: {there[step]} is damaged: {wrong}; give another step, or 0 to start again")
    return there[step]


def archive_later(directory: str, step: int) -> list[str]:
    """Moves the checkpoints after `step` (all of them for 0) to `archived/` and returns their new prefixes.

    It first writes a note, which `going_back` reports to later processes until `done_going_back` removes it.

    Raises:
      StorageError: when a file cannot be written or moved.
    """
    files.write_json(os.path.join(directory, ARCHIVED, _NOTE), {"step": step})
    later = [prefix for prefix in _ever_saved(directory) if step_of(prefix) > step or step == 0]
    folders = set_all_aside(later, ARCHIVED)
    if step:
        _point_to(directory, os.path.join(directory, f"ckpt-{step}"))
    return [os.path.join(folder, os.path.basename(prefix)) for prefix, folder in zip(later, folders, strict=True)]


def going_back(directory: str) -> int | None:
    """Returns the step of a rewind that a dead process did not finish; None if there is none.

    Raises:
      StorageError: when the note of the rewind cannot be read.
    """
    path = os.path.join(directory, ARCHIVED, _NOTE)
    try:
        with open(path, "rb") as stream:
            return int(files.parse_json(stream.read())["step"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the last start with --from_step was interrupted, and its note {path} cannot be read: {error!r}; start "
            "again with --from_step=N for the same step N"
        ) from error


def done_going_back(directory: str) -> None:
    """Removes the note of `archive_later`, once history, ledger and best checkpoint are rewound too."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(directory, ARCHIVED, _NOTE))


def set_aside(prefix: str, folder: str) -> str:
    """Moves the files of a checkpoint, the record first, to a folder next to it and returns that folder.

    The checkpoint leaves the pointer file first, since a missing file of a listed checkpoint counts as damage. If the
    folder already holds a checkpoint of this step, the files go to a numbered folder inside it.

    Raises:
      StorageError: when the files cannot be moved.
    """
    return set_all_aside([prefix], folder)[0]


def set_all_aside(prefixes: Iterable[str], folder: str) -> list[str]:
    """Moves checkpoints as `set_aside` does and returns the folder of each; writes the folders' pointer files last.

    Raises:
      StorageError: when they cannot be moved.
    """
    targets = [_move(prefix, folder) for prefix in prefixes]
    for target in sorted(set(targets)) if folder != DAMAGED else ():  # a pointer has to name what can be read
        _point_to_newest(target)
    return targets


def _move(prefix: str, folder: str) -> str:
    target = top = os.path.join(os.path.dirname(prefix), folder)
    number = 1
    while glob.glob(f"{glob.escape(os.path.join(target, os.path.basename(prefix)))}.*"):  # set aside another time
        number += 1
        target = os.path.join(top, str(number))
    _unpoint(prefix)
    try:
        os.makedirs(target, exist_ok=True)
        for path in sorted(own_files(prefix), key=lambda path: not path.endswith(RECORD)):
            os.replace(path, os.path.join(target, os.path.basename(path)))
    except OSError as error:
        raise StorageError(f"{prefix} cannot be moved to {target}: {error.strerror or error}") from error
    return target


def _point_to_newest(directory: str) -> None:
    """Makes the pointer file of a folder of moved checkpoints name its newest one; reads records, but no data."""
    there = list(complete_checkpoints(directory).values())
    if there and _pointed(directory)[:1] != [os.path.basename(there[-1])]:
        whole = next((prefix for prefix in reversed(there) if not problem(prefix, read=False)), None)
        if whole is not None:
            _point_to(directory, whole)


def _ever_saved(directory: str) -> list[str]:
    """Returns the prefixes of all saved checkpoints that files or the pointer file show, in the order of steps."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = {checkpoint for name in names if (checkpoint := owner(name))} | set(_pointed(directory))
    inside = glob.escape(directory)
    aside = (f"{inside}/{folder}/**/ckpt-*" for folder in (DIVERGED, ARCHIVED))
    if not found and any(glob.glob(pattern, recursive=True) for pattern in aside):
        _LOG.warning(
            "%s holds no checkpoint, so there is none to resume from: all of them were moved to %s/ or %s/",
            directory,
            DIVERGED,
            ARCHIVED,
        )
    return [os.path.join(directory, name) for name in sorted(found, key=step_of)]


def _pointed(directory: str) -> list[str]:
    """Returns the names of the checkpoints that the pointer file lists, newest first, whether they exist or not."""
    pattern = r'^(?:all_)?model_checkpoint_paths?: "(?:.*/)?(ckpt-\d+)"$'
    return re.findall(pattern, _pointer(directory), re.MULTILINE)


def _pointer(directory: str) -> str:
    try:
        with open(os.path.join(directory, POINTER), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _unpoint(prefix: str) -> None:
    """Removes a checkpoint from the pointer file of its folder, if it is listed there."""
    directory, name = os.path.split(prefix)
    pointed = _pointed(directory)
    left = sorted({other for other in pointed if other != name}, key=step_of)
    if left and name in pointed:
        _write_pointer(directory, left)
    elif name in pointed:
        os.remove(os.path.join(directory, POINTER))


def _point_to(directory: str, prefix: str) -> None:
    """Makes TensorFlow's pointer file list `prefix` as the newest after the earlier ones; writes only if needed."""
    there = [
        os.path.basename(path) for path in complete_checkpoints(directory).values() if step_of(path) <= step_of(prefix)
    ]
    newest = os.path.basename(prefix)
    if not _pointer(directory).endswith("\n") or _pointed(directory) != [newest, *there]:
        _write_pointer(directory, there)


def _write_pointer(directory: str, there: list[str]) -> None:
    """Writes TensorFlow's pointer file for the checkpoints named, in the order of steps."""
    try:
        files.write_text(os.path.join(directory, POINTER), pointer_text(there))
    except StorageError as error:  # the file is for other programs; ours goes by the checkpoints that are whole
        _LOG.warning("%s", error)
