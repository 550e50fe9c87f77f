"""Scans model_dir when a trainer starts: finds the checkpoint to resume from, or to go back to.

Nothing here is silent. Damaged checkpoints are moved to `damaged/` with a warning once an older
whole checkpoint is found. Without one the run does not start, since it would start from step 0. A
checkpoint that another run saved is refused. Files of other programs are not touched.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Collection

from trainer_kit import files
from trainer_kit.checkpoint_names import (
    RECORD_SUFFIX,
    check_step_exists,
    complete_checkpoints,
    list_checkpoint_files,
    parse_checkpoint_name,
    parse_step,
)
from trainer_kit.checkpoints.commit import (
    describe_damage,
    describe_foreign_checkpoint,
    read_commit_record,
    write_commit_record,
)
from trainer_kit.checkpoints.pointer_file import read_checkpoint_names, write_pointer
from trainer_kit.errors import StorageError, UsageError

# The folders to which checkpoints are moved
DAMAGED = "damaged"
DIVERGED = "diverged"
ARCHIVED = "archived"
# The note of a rewind that has begun
_NOTE = "going_back.json"
_LOG = logging.getLogger(__name__)


def recover_newest_checkpoint(directory: str, run_id: str = "") -> str | None:
    """Returns the prefix of the newest whole checkpoint, or None when none was ever saved.

    Newer damaged checkpoints are moved to `damaged/`, and the pointer file is repaired.

    Raises:
      StorageError: when checkpoints were saved but none is whole, or another run saved the newest.
    """
    damage_by_prefix: dict[str, str] = {}
    for prefix in reversed(_list_saved_checkpoints(directory)):
        if message := describe_foreign_checkpoint(prefix, run_id):
            raise StorageError(message)
        if damage := describe_damage(prefix):
            damage_by_prefix[prefix] = damage
            continue

        for damaged_prefix, reason in damage_by_prefix.items():
            folder = set_aside(damaged_prefix, DAMAGED)
            _LOG.warning(
                "%s is damaged: %s; it was moved to %s, and %s is used",
                damaged_prefix,
                reason,
                folder,
                prefix,
            )
        if not os.path.exists(prefix + RECORD_SUFFIX):
            _LOG.info(
                "%s has no record of its checksums; it was read completely instead and is whole",
                prefix,
            )
        elif read_commit_record(prefix) is None:
            # Without a record rotation would never remove the checkpoint.
            entries = {"run_id": run_id} if run_id else {}
            write_commit_record(prefix, **entries)
        _repair_pointer(directory)
        return prefix

    if damage_by_prefix:
        descriptions = [
            f"{os.path.basename(prefix)}: {reason}" for prefix, reason in damage_by_prefix.items()
        ]
        reasons = "; ".join(descriptions[:3])
        more = ""
        if len(descriptions) > 3:
            more = f"; and {len(descriptions) - 3} more"
        raise StorageError(
            f"no checkpoint in {directory} is whole ({reasons}{more}); "
            "restore one from a backup, or start again from step 0 with --from_step=0, "
            "which moves the existing files to archived/"
        )
    return None


def check_from_step(directory: str, step: int, run_id: str = "") -> None:
    """Checks that the run can go back to the step that --from_step names.

    Step 0 starts again.

    Raises:
      UsageError: when there is no checkpoint of that step, or it is damaged, or another run saved
        it.
    """
    if step == 0:
        return
    checkpoints = {parse_step(prefix): prefix for prefix in _list_saved_checkpoints(directory)}
    check_step_exists(step, checkpoints)

    if message := describe_foreign_checkpoint(checkpoints[step], run_id):
        raise UsageError(f"--from_step: {message}")
    if reason := describe_damage(checkpoints[step]):
        raise UsageError(
            f"--from_step: {checkpoints[step]} is damaged: {reason}; "
            "give another step, or 0 to start again"
        )


def archive_later_checkpoints(directory: str, step: int) -> None:
    """Moves the checkpoints after `step` (all of them for 0) to `archived/`.

    It first writes a note, which `find_unfinished_rewind` reports to later processes until
    `finish_rewind` removes it.

    Raises:
      StorageError: when a file cannot be written or moved.
    """
    files.write_json(os.path.join(directory, ARCHIVED, _NOTE), {"step": step})
    later_prefixes = [
        prefix
        for prefix in _list_saved_checkpoints(directory)
        if parse_step(prefix) > step or step == 0
    ]
    archived_prefixes = [
        os.path.join(set_aside(prefix, ARCHIVED), os.path.basename(prefix))
        for prefix in later_prefixes
    ]
    if archived_prefixes:
        _LOG.warning(
            "the run goes back to step %d; later ones were moved: %s",
            step,
            ", ".join(archived_prefixes),
        )


def find_unfinished_rewind(directory: str) -> int | None:
    """Returns the step of a rewind that a dead process did not finish, or None.

    Raises:
      StorageError: when the note of the rewind cannot be read.
    """
    path = os.path.join(directory, ARCHIVED, _NOTE)
    if not os.path.exists(path):
        return None
    step = (files.read_json(path) or {}).get("step")
    if not isinstance(step, int):
        raise StorageError(
            f"the last start with --from_step was interrupted, and its note {path} cannot be read; "
            "start again with --from_step=N for the same step N"
        )
    return step


def finish_rewind(directory: str) -> None:
    """Removes the note of `archive_later_checkpoints`.

    Call it once history, ledger and best checkpoint are rewound too.
    """
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(directory, ARCHIVED, _NOTE))


def set_aside(prefix: str, folder: str) -> str:
    """Moves the files of a checkpoint, the record first, to a folder next to it.

    If the folder already contains a checkpoint of this step, the files go to a numbered folder
    inside it.

    Returns:
      The folder to which the files were moved.

    Raises:
      StorageError: when the files cannot be moved.
    """
    directory, checkpoint = os.path.split(prefix)
    top = os.path.join(directory, folder)
    target = top
    number = 1
    while list_checkpoint_files(os.path.join(target, checkpoint)):
        number += 1
        target = os.path.join(top, str(number))

    # The checkpoint leaves the pointer file first, since a missing file of a listed checkpoint
    # counts as damage.
    _repair_pointer(directory, without=[prefix])
    try:
        os.makedirs(target, exist_ok=True)
        paths = list_checkpoint_files(prefix)
        for path in sorted(paths, key=lambda path: not path.endswith(RECORD_SUFFIX)):
            file_name = os.path.basename(path)
            new_path = os.path.join(target, file_name)
            os.replace(path, new_path)
    except OSError as error:
        raise StorageError(
            f"{prefix} cannot be moved to {target}: {error.strerror or error}"
        ) from error
    return target


def _list_saved_checkpoints(directory: str) -> list[str]:
    """Returns the prefixes of all saved checkpoints, in the order of steps.

    These are the ones that files or the pointer file show.
    """
    checkpoints = set(read_checkpoint_names(directory))
    if os.path.isdir(directory):
        for name in os.listdir(directory):
            if checkpoint := parse_checkpoint_name(name):
                checkpoints.add(checkpoint)

    are_moved = False
    if not checkpoints:
        parent = glob.escape(directory)
        patterns = (f"{parent}/{folder}/**/ckpt-*" for folder in (DIVERGED, ARCHIVED))
        are_moved = any(glob.glob(pattern, recursive=True) for pattern in patterns)
    if are_moved:
        _LOG.warning(
            "%s holds no checkpoint, so there is none to resume from: "
            "all of them were moved to %s/ or %s/",
            directory,
            DIVERGED,
            ARCHIVED,
        )
    names = sorted(checkpoints, key=parse_step)
    return [os.path.join(directory, name) for name in names]


def _repair_pointer(directory: str, without: Collection[str] = ()) -> None:
    """Writes the pointer file. A failure is only logged, since the file is for other programs."""
    try:
        prefixes = complete_checkpoints(directory).values()
        write_pointer(directory, [prefix for prefix in prefixes if prefix not in without])
    except (OSError, StorageError) as error:
        _LOG.warning("%s", error)
