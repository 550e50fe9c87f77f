"""Commit records: sizes and checksums of a checkpoint's files, written when the files are complete and on the disk.

`ckpt-<step>.commit.json` holds the size and the CRC-32 of every file of the checkpoint. TensorFlow renames finished
files into place but never forces them to the disk, so `commit` does that first. A checkpoint without a record, such as
TF Model Garden's or one whose process died before the record, is read completely, with TensorFlow's own checksums,
before it is trusted. The record also holds the `run_id` of the run's manifest.json and, for a checkpoint that the run
has saved, the time of the save, which a copy of the folder keeps; records of earlier versions do not.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import ITERATOR, RECORD, own_files

_CHUNK = 1 << 22  # bytes


def commit(prefix: str, point: str = "checkpoint.record", **others: Any) -> None:
    """Forces the files of a finished checkpoint to the disk, then writes its record; runs in any thread.

    Args:
      prefix: The checkpoint's prefix.
      point: The name under which fault injection knows the record.
      **others: Further entries of the record.

    Raises:
      StorageError: when the record cannot be written.
      OSError: when a file cannot be read back.
    """
    record = {}
    for path in own_files(prefix):
        if not path.endswith(RECORD):
            record[os.path.basename(path)] = {"bytes": os.path.getsize(path), "crc32": _checksum(path, flush=True)}
    files.flush_folder(os.path.dirname(prefix))
    files.write_json(prefix + RECORD, {"files": record, **others}, point=point)


def read_record(prefix: str) -> dict[str, Any] | None:
    """Returns the record of the checkpoint at `prefix`; None if there is none or it is damaged."""
    try:
        record = files.read_json(prefix + RECORD)
        return record if record and isinstance(record["files"], dict) else None
    except KeyError:
        return None


def is_own(prefix: str, run_id: str) -> bool:
    """Whether a record says that this run saved the checkpoint at `prefix`; a record without a run_id counts too.

    Args:
      prefix: The checkpoint's prefix.
      run_id: The run's identity; for "" any record counts.
    """
    record = read_record(prefix)
    return record is not None and (not run_id or record.get("run_id", run_id) == run_id)


def is_foreign(prefix: str, run_id: str) -> bool:
    """Whether a record says that another run saved the checkpoint at `prefix`."""
    return read_record(prefix) is not None and not is_own(prefix, run_id)


def problem(prefix: str, read: bool = True) -> str:
    """Returns what is wrong with the checkpoint at `prefix`; "" if it is whole.

    Args:
      prefix: The checkpoint's prefix.
      read: Whether to read all files; otherwise only their sizes are compared with the record, if there is one.
    """
    if not os.path.exists(prefix + ".index"):
        return f"{os.path.basename(prefix)}.index is missing"
    record = read_record(prefix)
    try:
        wanted = record["files"] if record else {}
        if not wanted:  # a record that is damaged itself says nothing about the checkpoint
            return _unreadable(prefix) if read else ""
        return next(filter(None, (_difference(prefix, name, wanted[name], read) for name in sorted(wanted))), "")
    except (OSError, ValueError, TypeError, KeyError):
        return _unreadable(prefix) if read else ""


def _difference(prefix: str, name: str, wanted: dict[str, Any], read: bool) -> str:
    path = os.path.join(os.path.dirname(prefix), name)
    if not os.path.exists(path):
        return f"{name} is missing"
    if (size := os.path.getsize(path)) != wanted["bytes"]:
        return f"{name} has {size} bytes instead of {wanted['bytes']}"
    return "" if not read or _checksum(path) == wanted["crc32"] else f"{name} has a wrong checksum"


def _unreadable(prefix: str) -> str:
    import tensorflow as tf  # a checkpoint with a record is checked without TensorFlow

    iterators = {path.rpartition(".")[0] for path in own_files(prefix) if path.startswith(prefix + ITERATOR)}
    try:
        for part in [prefix, *sorted(iterators)]:
            reader = tf.train.load_checkpoint(part)
            for name, kind in reader.get_variable_to_dtype_map().items():
                # Python has no value for the state of an iterator; TensorFlow raises only after it has read the state.
                with contextlib.suppress(*([tf.errors.InternalError] if kind == tf.variant else [])):
                    reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
        text = str(getattr(error, "message", None) or error).splitlines()
        return f"it cannot be read ({text[0] if text else type(error).__name__})"
    return ""


def _checksum(path: str, flush: bool = False) -> int:
    """Returns zlib's CRC-32, which detects the damage that disks cause and runs at the speed of memory."""
    value = 0
    with open(path, "rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
