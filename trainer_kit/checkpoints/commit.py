"""Commit records: what a checkpoint's files have to be, written when they are whole and on the disk.

`ckpt-<step>.commit.json` holds the size and the CRC-32 of every file of the checkpoint. TensorFlow renames finished
files into place but never forces them to the disk, so that is done here first. A checkpoint without a record, such as
TF Model Garden's or one whose process died before the record, is read whole, with TensorFlow's own checksums, before it
is trusted. The record also holds the identity of the run, the `run_id` of its manifest.json; those that earlier
versions wrote do not.
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
    """Forces the files of a finished checkpoint to the disk, then writes its record. In any thread.

    Args:
      prefix: of the checkpoint.
      point: the name under which fault injection knows the record.
      **others: what the record is to hold beside the files.

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
    """Whether a record says that this run saved the checkpoint at `prefix`; one without an identity says so too.

    Args:
      prefix: of the checkpoint.
      run_id: of the run; "": it has none, and any record counts.
    """
    record = read_record(prefix)
    return record is not None and (not run_id or record.get("run_id", run_id) == run_id)


def is_foreign(prefix: str, run_id: str) -> bool:
    """Whether a record says that another run saved the checkpoint at `prefix`."""
    return read_record(prefix) is not None and not is_own(prefix, run_id)


def problem(prefix: str, read: bool = True) -> str:
    """Returns what is wrong with the checkpoint at `prefix`; "" if it is whole.

    Args:
      prefix: of the checkpoint.
      read: whether to read all of it; else the sizes of its files have to be those of the record, if there is one.
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
    import tensorflow as tf  # what has a record is checked without

    iterators = {path.rpartition(".")[0] for path in own_files(prefix) if path.startswith(prefix + ITERATOR)}
    try:
        for part in [prefix, *sorted(iterators)]:
            reader = tf.train.load_checkpoint(part)
            for name, kind in reader.get_variable_to_dtype_map().items():
                # The state of an iterator is of a kind that Python has no value for, which is said once it was read.
                with contextlib.suppress(*([tf.errors.InternalError] if kind == tf.variant else [])):
                    reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
        text = str(getattr(error, "message", None) or error).splitlines()
        return f"it cannot be read ({text[0] if text else type(error).__name__})"
    return ""


def _checksum(path: str, flush: bool = False) -> int:
    """CRC-32 as zlib has it: it finds any damage of the kinds that disks do, at the speed of memory."""
    value = 0
    with open(path, "rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
