"""Scans model_dir when a trainer starts: finds the checkpoint to resume from, or to go back to.

Nothing here is silent. Damaged checkpoints are moved to `damaged/` with a warning once an older
whole checkpoint is found; without one the run does not start, since it would start from step 0. A
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

DAMAGED, DIVERGED, ARCHIVED = "damaged", "diverged", "archived"
_NOTE = "going_back.json"
_LOG = logging.getLogger(__name__)


def recover_newest_checkpoint(directory: str, run_id: str = "") -> str | None:
    """Returns the prefix of the newest whole checkpoint; None when none was ever saved. Repairs the pointer file.

    Newer damaged checkpoints are moved to `damaged/`.

    Raises:
      StorageError: when checkpoints were saved but none is whole, or another run saved the newest.
    """
    damaged: dict[str, str] = {}
    for prefix in reversed(_list_saved_checkpoints(directory)):
        if foreign := describe_foreign_checkpoint(prefix, run_id):
            raise StorageError(foreign)
        if reason := describe_damage(prefix):
            damaged[prefix] = reason
            continue

        for other, reason in damaged.items():
            moved = set_aside(other, DAMAGED)
            _LOG.warning(
                "%s is damaged: %s; it was moved to %s, and %s is used",
                other,
                reason,
                moved,
                prefix,
            )
        if not os.path.exists(prefix + RECORD_SUFFIX):
            _LOG.info(
                "%s has no record of its checksums; it was read completely instead and is whole",
                prefix,
            )
        elif read_commit_record(prefix) is None:  # rotation would never remove it
            write_commit_record(prefix, **({"run_id": run_id} if run_id else {}))
        _repair_pointer(directory)
        return prefix

    if damaged:
        reasons = "; ".join(
            f"{os.path.basename(prefix)}: {reason}" for prefix, reason in list(damaged.items())[:3]
        )
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise StorageError(
            f"no checkpoint in {directory} is whole ({reasons}{more}); restore one from a backup,"
            " or start again from step 0 with --from_step=0, which moves the existing files to"
            " archived/"
        )
    return None


def check_from_step(directory: str, step: int, run_id: str = "") -> None:
    """Checks that the run can go back to the step that --from_step names; 0 starts again.

    Raises:
      UsageError: when there is no checkpoint of that step, or it is damaged, or another run saved
        it.
    """
    if step == 0:
        return
    checkpoints = {parse_step(prefix): prefix for prefix in _list_saved_checkpoints(directory)}
    check_step_exists(step, checkpoints)
    if foreign := describe_foreign_checkpoint(checkpoints[step], run_id):
        raise UsageError(f"--from_step: {foreign}")
    if reason := describe_damage(checkpoints[step]):
        raise UsageError(
            f"--from_step: {checkpoints[step]} is damaged: {reason}; give another step, or 0 to"
            " start again"
        )


def archive_later_checkpoints(directory: str, step: int) -> None:
    """Moves the checkpoints after `step` (all of them for 0) to `archived/`.

    It first writes a note, which `find_unfinished_rewind` reports to later processes until
    `finish_rewind` removes it.

    Raises:
      StorageError: when a file cannot be written or moved.
    """
    files.write_json(os.path.join(directory, ARCHIVED, _NOTE), {"step": step})
    later = [
        prefix
        for prefix in _list_saved_checkpoints(directory)
        if parse_step(prefix) > step or step == 0
    ]
    moved = [
        os.path.join(set_aside(prefix, ARCHIVED), os.path.basename(prefix)) for prefix in later
    ]
    if moved:
        _LOG.warning(
            "the run goes back to step %d; later ones were moved: %s", step, ", ".join(moved)
        )


def find_unfinished_rewind(directory: str) -> int | None:
    """Returns the step of a rewind that a dead process did not finish; None if there is none.

    Raises:
      StorageError: when the note of the rewind cannot be read.
    """
    path = os.path.join(directory, ARCHIVED, _NOTE)
    if not os.path.exists(path):
        return None
    step = (files.read_json(path) or {}).get("step")
    if not isinstance(step, int):
        raise StorageError(
            f"the last start with --from_step was interrupted, and its note {path} cannot be read;"
            " start again with --from_step=N for the same step N"
        )
    return step


def finish_rewind(directory: str) -> None:
    """Removes the note of `archive_later_checkpoints`, once history, ledger and best checkpoint are rewound too."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(directory, ARCHIVED, _NOTE))


def set_aside(prefix: str, folder: str) -> str:
    """Moves the files of a checkpoint, the record first, to a folder next to it and returns that folder.

    The checkpoint leaves the pointer file first, since a missing file of a listed checkpoint counts
    as damage. If the folder already holds a checkpoint of this step, the files go to a numbered
    folder inside it.

    Raises:
      StorageError: when the files cannot be moved.
    """
    directory, checkpoint = os.path.split(prefix)
    target = top = os.path.join(directory, folder)
    number = 1
    while list_checkpoint_files(os.path.join(target, checkpoint)):
        number += 1
        target = os.path.join(top, str(number))

    _repair_pointer(directory, without=[prefix])
    try:
        os.makedirs(target, exist_ok=True)
        for path in sorted(
            list_checkpoint_files(prefix), key=lambda path: not path.endswith(RECORD_SUFFIX)
        ):
            os.replace(path, os.path.join(target, os.path.basename(path)))
    except OSError as error:
        raise StorageError(
            f"{prefix} cannot be moved to {target}: {error.strerror or error}"
        ) from error
    return target


def _list_saved_checkpoints(directory: str) -> list[str]:
    """Returns the prefixes of all saved checkpoints that files or the pointer file show, in the order of steps."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    saved = {checkpoint for name in names if (checkpoint := parse_checkpoint_name(name))} | set(
        read_checkpoint_names(directory)
    )
    inside = glob.escape(directory)
    aside = (f"{inside}/{folder}/**/ckpt-*" for folder in (DIVERGED, ARCHIVED))
    if not saved and any(glob.glob(pattern, recursive=True) for pattern in aside):
        _LOG.warning(
            "%s holds no checkpoint, so there is none to resume from: all of them were moved to %s/"
            " or %s/",
            directory,
            DIVERGED,
            ARCHIVED,
        )
    return [os.path.join(directory, name) for name in sorted(saved, key=parse_step)]


def _repair_pointer(directory: str, without: Collection[str] = ()) -> None:
    """Writes the pointer file; a failure is only logged."""
    try:
        write_pointer(
            directory,
            [item for item in complete_checkpoints(directory).values() if item not in without],
        )
    except (OSError, StorageError) as error:  # the file is for other programs
        _LOG.warning("%s", error)
