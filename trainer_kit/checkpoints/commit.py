"""The commit protocol of checkpoints: write to a temporary folder, record, rename.

A save writes its files to the folder `.saving-ckpt-<step>`. When they are complete, `finish_save`
forces them to the disk, writes the commit record `ckpt-<step>.commit.json` beside them and moves
all files into place, the record last. After a kill, `finish_interrupted_saves` continues. It moves
a temporary folder with a record into place and removes any other. So a checkpoint is either
complete or absent, and one that is saved again stays complete.

The record contains the size and the CRC-32 of every file, the `run_id` of the run's manifest.json,
and the time of the save, which a copy of the folder keeps. A checkpoint without a record, such as
one of the TF Model Garden, is read completely, with TensorFlow's own checksums, before it is
trusted. `describe_damage` says what is wrong with a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import (
    ITERATOR_SUFFIX,
    POINTER_FILE,
    RECORD_SUFFIX,
    TEMPORARY_NAME_PATTERN,
    list_checkpoint_files,
    parse_checkpoint_name,
)
from trainer_kit.errors import StorageError

_SAVING = ".saving-"
# An empty file of earlier versions, with the run_id
_OLD_MARK = re.compile(r"\.saving-(ckpt-\d+)(?:\.(\w+))?")
# The bytes that a checksum reads at once
_CHUNK = 1 << 22


def begin_save(prefix: str) -> str:
    """Creates the temporary folder of the checkpoint `prefix`.

    Returns:
      The temporary prefix to which the files of the checkpoint have to be written.

    Raises:
      OSError: when the temporary folder cannot be created, or when an earlier save of this step
        cannot be moved into place.
    """
    files.report_write_point("checkpoint.begin", prefix)
    # Otherwise a kill during this save would leave no complete checkpoint of the step.
    if is_commit_pending(prefix):
        _move_into_place(prefix)

    # A save that was not recorded leaves nothing that is needed.
    folder = _temporary_folder(prefix)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return _temporary_prefix(prefix)


def finish_save(prefix: str, point: str = "checkpoint", **entries: Any) -> None:
    """Forces the written files to the disk, records them and moves them into place.

    Runs in any thread.

    Args:
      prefix: The checkpoint's prefix, for which `begin_save` was called.
      point: The name under which fault injection knows the record.
      **entries: Further entries of the record.

    Raises:
      StorageError: when the record cannot be written.
      OSError: when a file cannot be read back or moved.
    """
    temporary_prefix = _temporary_prefix(prefix)
    write_commit_record(temporary_prefix, point=f"{point}.record", **entries)
    _move_into_place(prefix)


def fail_save(prefix: str, error: Exception | None) -> StorageError:
    """Removes the files of a failed save and returns the error to raise.

    The error says what failed, and why. The files of an earlier checkpoint of this step stay. A
    recorded save stays too, since its files may have replaced some of the earlier checkpoint. The
    next save of the step, or the next start, moves the rest into place.
    """
    folder = _temporary_folder(prefix)
    outcome = "was not written"
    is_in_place = os.path.exists(prefix + RECORD_SUFFIX)
    if is_in_place and not os.path.isdir(folder):
        outcome = (
            "was written, but the file that names it was not, "
            "or an older checkpoint was not removed"
        )

    if not is_commit_pending(prefix):
        shutil.rmtree(folder, ignore_errors=True)
    directory = os.path.dirname(prefix)
    return create_write_error(f"the checkpoint {prefix} {outcome}", directory, error)


def create_write_error(what: str, folder: str, error: Exception | None) -> StorageError:
    """Returns the error for a failed write: `what` failed, why, and how much space `folder` has."""
    # Errors of TensorFlow have a message, those of the operating system a text.
    message = getattr(error, "message", None) or getattr(error, "strerror", None)
    text = str(message or error or "")
    # TensorFlow's messages contain the names of nodes and operations.
    text = re.sub(r"\{\{.*?\}\} ?|\[Op:\w+\]", "", text)
    reason = text.strip().partition("\n")[0]
    reason = reason or "the reason is not known; is the disk full?"

    if not os.path.isdir(folder) or "Permission denied" in reason:
        return StorageError(f"{what}: {reason}; give a writable folder")
    free_bytes = shutil.disk_usage(folder).free
    return StorageError(
        f"{what}: {reason} ({free_bytes:,} bytes are free there); "
        "free some space, then run the same command again: "
        "it resumes from the newest whole checkpoint"
    )


def is_commit_pending(prefix: str) -> bool:
    """Whether a save of the checkpoint `prefix` is recorded and not yet in place."""
    temporary_prefix = _temporary_prefix(prefix)
    return read_commit_record(temporary_prefix) is not None


def write_commit_record(prefix: str, point: str = "checkpoint.record", **entries: Any) -> None:
    """Forces the files at `prefix` to the disk, then writes their record.

    Raises:
      StorageError: when the record cannot be written.
      OSError: when a file cannot be read back.
    """
    file_entries = {}
    for path in list_checkpoint_files(prefix):
        if path.endswith(RECORD_SUFFIX):
            continue
        name = os.path.basename(path)
        file_entries[name] = {
            "bytes": os.path.getsize(path),
            "crc32": _checksum(path, flush=True),
        }

    folder = os.path.dirname(prefix)
    files.flush_folder(folder)
    record_path = prefix + RECORD_SUFFIX
    record = {"files": file_entries, **entries}
    files.write_json(record_path, record, point=point)


def finish_interrupted_saves(directory: str) -> None:
    """Finishes or undoes what a dead process has begun, and removes its half-written files.

    Only the process that holds the folder's lock may call this.

    Args:
      directory: A folder of checkpoints, which need not exist.
    """
    if not os.path.isdir(directory):
        return

    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        checkpoint = name.removeprefix(_SAVING)
        prefix = os.path.join(directory, checkpoint)
        if _is_half_written(name) and os.path.isfile(path):
            os.remove(path)
        elif name != checkpoint and os.path.isdir(path):
            # A temporary folder of a save, or an empty one that marks a removal as begun
            if is_commit_pending(prefix):
                _move_into_place(prefix)
            elif read_commit_record(prefix) is None:
                remove_checkpoint(prefix)
            else:
                shutil.rmtree(path)
        elif mark := _OLD_MARK.fullmatch(name):
            prefix = os.path.join(directory, mark[1])
            _undo_save_in_place(prefix)
            # Without a record rotation would never remove the checkpoint.
            if list_checkpoint_files(prefix) and read_commit_record(prefix) is None:
                run_id = mark[2]
                entries = {"run_id": run_id} if run_id else {}
                write_commit_record(prefix, **entries)
            os.remove(path)
        elif unfinished := TEMPORARY_NAME_PATTERN.fullmatch(name):
            prefix = os.path.join(directory, unfinished[1])
            _undo_save_in_place(prefix)
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.remove(path)


def remove_checkpoint(prefix: str) -> None:
    """Removes the files of a checkpoint.

    Raises:
      OSError: when a file cannot be removed.
    """
    # The empty temporary folder marks the removal as begun.
    begin_save(prefix)

    # The record is removed first, and the data last.
    paths = sorted(
        list_checkpoint_files(prefix),
        key=lambda path: (not path.endswith(RECORD_SUFFIX), ".data-" in path),
    )
    for path in paths:
        files.report_write_point("checkpoint.remove", path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    os.rmdir(_temporary_folder(prefix))


def read_commit_record(prefix: str) -> dict[str, Any] | None:
    """Returns the record of the checkpoint at `prefix`, or None if it is absent or damaged."""
    record = files.read_json(prefix + RECORD_SUFFIX)
    if not record or not isinstance(record.get("files"), dict):
        return None
    return record


def is_saved_by_run(prefix: str, run_id: str) -> bool:
    """Whether a record says that this run saved the checkpoint at `prefix`.

    A record without a run_id counts too.

    Args:
      prefix: The checkpoint's prefix.
      run_id: The run's identity. For "" any record counts.
    """
    if read_commit_record(prefix) is None:
        return False
    return not is_foreign(prefix, run_id)


def is_foreign(prefix: str, run_id: str) -> bool:
    """Whether a record says that another run saved the checkpoint at `prefix`."""
    record = read_commit_record(prefix)
    if record is None or not run_id:
        return False
    recorded_id = record.get("run_id", run_id)
    return recorded_id != run_id


def describe_foreign_checkpoint(prefix: str, run_id: str) -> str:
    """Returns why this run does not use the checkpoint at `prefix`.

    Returns "" unless another run saved it.
    """
    if not is_foreign(prefix, run_id):
        return ""
    return (
        f"another run saved {prefix}: "
        "the run_id in its record differs from that in manifest.json; "
        "move this checkpoint away, or copy it to a folder of its own and resume from it there"
    )


def describe_damage(prefix: str) -> str:
    """Returns what is wrong with the checkpoint at `prefix`, or "" if it is whole.

    All files are read.
    """
    folder, checkpoint = os.path.split(prefix)
    if not os.path.exists(prefix + ".index"):
        return f"{checkpoint}.index is missing"

    record = read_commit_record(prefix)
    try:
        file_entries = record["files"] if record else {}
        # A record that is damaged itself says nothing about the checkpoint.
        if not file_entries:
            return _describe_read_failure(prefix)

        for name in sorted(file_entries):
            path = os.path.join(folder, name)
            if not os.path.exists(path):
                return f"{name} is missing"

            # The size first, since a checksum reads the whole file.
            entry = file_entries[name]
            size = os.path.getsize(path)
            recorded_size = entry["bytes"]
            if size != recorded_size:
                return f"{name} has {size} bytes instead of {recorded_size}"
            if _checksum(path) != entry["crc32"]:
                return f"{name} has a wrong checksum"
        return ""
    except (OSError, ValueError, TypeError, KeyError):
        return _describe_read_failure(prefix)


def _temporary_folder(prefix: str) -> str:
    directory, name = os.path.split(prefix)
    return os.path.join(directory, f"{_SAVING}{name}")


def _temporary_prefix(prefix: str) -> str:
    folder = _temporary_folder(prefix)
    name = os.path.basename(prefix)
    return os.path.join(folder, name)


def _move_into_place(prefix: str) -> None:
    """Moves a recorded save into place.

    After a kill at any moment, the next call moves the rest.
    """
    directory, checkpoint = os.path.split(prefix)
    folder = _temporary_folder(prefix)
    temporary_prefix = _temporary_prefix(prefix)
    record = read_commit_record(temporary_prefix) or {}
    file_names = set(record.get("files", ()))

    # These files belong to an earlier save of this step.
    for path in list_checkpoint_files(prefix):
        name = os.path.basename(path)
        if path.endswith(RECORD_SUFFIX) or name not in file_names:
            os.remove(path)

    # The index follows the other files, and the record comes last: it completes the checkpoint.
    names = [name for name in os.listdir(folder) if name in file_names]
    names.sort(key=lambda name: (name == f"{checkpoint}.index", name))
    for name in names:
        source = os.path.join(folder, name)
        target = os.path.join(directory, name)
        files.report_write_point("checkpoint.move", target)
        os.replace(source, target)
    # The names are on the disk before the record is.
    files.flush_folder(directory)

    temporary_path = os.path.join(folder, checkpoint + RECORD_SUFFIX)
    record_path = prefix + RECORD_SUFFIX
    files.report_write_point("checkpoint.move", record_path)
    os.replace(temporary_path, record_path)
    files.flush_folder(directory)
    shutil.rmtree(folder)


def _is_half_written(name: str) -> bool:
    """Whether `name` is a half-written file of files.py, or of TensorFlow's pointer file."""
    if match := re.fullmatch(r"\.(.+)\.(\d+)\.tmp", name):
        # With the id of this process only files of checkpoints count, since another thread may be
        # writing the heartbeat.
        process_id = int(match[2])
        if process_id != os.getpid():
            return True
        step = parse_checkpoint_name(match[1])
        return step is not None

    pointer_pattern = POINTER_FILE + r"\.tmp[0-9a-f]{32}"
    return re.fullmatch(pointer_pattern, name) is not None


def _undo_save_in_place(prefix: str) -> None:
    """Removes what a save of an earlier version, or of TensorFlow's manager, has left.

    Complete checkpoints stay.
    """
    if read_commit_record(prefix) is None and describe_damage(prefix):
        for path in list_checkpoint_files(prefix):
            os.remove(path)


def _describe_read_failure(prefix: str) -> str:
    # A checkpoint with a record is checked without TensorFlow.
    import tensorflow as tf

    iterator_prefixes = set()
    for path in list_checkpoint_files(prefix):
        if path.startswith(prefix + ITERATOR_SUFFIX):
            iterator_prefix, _, _ = path.rpartition(".")
            iterator_prefixes.add(iterator_prefix)

    prefixes = [prefix, *sorted(iterator_prefixes)]
    try:
        for checkpoint_prefix in prefixes:
            reader = tf.train.load_checkpoint(checkpoint_prefix)
            dtypes = reader.get_variable_to_dtype_map()
            for name, dtype in dtypes.items():
                # Python has no value for the state of an iterator. TensorFlow raises only after it
                # has read the state.
                expected_errors = [tf.errors.InternalError] if dtype == tf.variant else []
                with contextlib.suppress(*expected_errors):
                    reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
        message = str(getattr(error, "message", None) or error)
        lines = message.splitlines() or [type(error).__name__]
        return f"it cannot be read ({lines[0]})"
    return ""


def _checksum(path: str, flush: bool = False) -> int:
    """Returns zlib's CRC-32 of a file, after it was forced to the disk if `flush`.

    It detects the damage that disks cause and runs at the speed of memory.
    """
    value = 0
    with open(path, "rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
