"""Reads the records of TFRecord files in any order, by an index of their offsets.

A file is a row of frames: length (8 bytes), its checksum (4), the record, its checksum (4). The
index needs the first 12 bytes of each frame only. Records are checked by TensorFlow's own reader,
which can only read from the front; so the frames of a batch are put into a file in memory, which it
reads through. (TensorFlow's reader for single records takes 1.3 ms for one and cannot be shared by
threads; tf.data's byte offsets take 0.2 ms; this takes 6 us, all included.)
"""

from __future__ import annotations

import array
import contextlib
import glob
import inspect
import itertools
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError, UsageError
from trainer_kit.files import is_remote

_HEAD, _FRAME = 12, 16  # bytes of length and checksum; and with the checksum after the record
_COMPRESSED = {
    b"\x1f\x8b": "GZIP",
    b"\x78\x01": "ZLIB",
    b"\x78\x5e": "ZLIB",
    b"\x78\x9c": "ZLIB",
    b"\x78\xda": "ZLIB",
}
_CASTAGNOLI = 0x82F63B78  # the polynomial of the checksum, CRC-32C, bits reversed
_CHECKED_AT_ONCE = 1 << 20  # headers
_SAMPLED = 64  # records that the identity reads
# Without the decorator that logs, once in a process, that another reader should be used: none reads
# such files faster.
_iterate_file_records = inspect.unwrap(tf.compat.v1.io.tf_record_iterator)


class RecordFiles:
    """All records of some TFRecord files, numbered from 0 in the order of the files and of the records in each.

    Opening reads each header once: 0.6 s for a million small records in the page cache. The index
    takes 8 bytes for each record. No file stays open.

    Args:
      paths: local files.

    Raises:
      DataError: when a file is empty, compressed, cut or damaged (as far as headers tell), or
        cannot be read; it names the file and the offset in bytes.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        offsets = [_read_offsets(path) for path in self._paths]
        # Of each file the offsets of all records, then its length: record i of file f has entry i +
        # f, and ends where the next entry begins.
        self._offsets = np.concatenate(offsets)
        self._first_indices = np.cumsum([0, *(len(one) - 1 for one in offsets)])

    def __len__(self) -> int:
        return int(self._first_indices[-1])

    def read_records(self, indices: np.ndarray) -> np.ndarray:
        """Returns the records (bytes, dtype object) at `indices` (int64, [batch]), in this order, checked.

        Safe in several threads at once.

        Raises:
          DataError: when a record is damaged or a file can no longer be read; it names the file and
            the offset.
        """
        files = np.searchsorted(self._first_indices, indices, side="right") - 1
        begins, ends = self._offsets[indices + files], self._offsets[indices + files + 1]
        frames: list[bytes] = [b""] * len(indices)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            places = zip(rows.tolist(), begins[rows].tolist(), ends[rows].tolist(), strict=True)
            self._read_frames(self._paths[file], list(places), frames)
        sound = _read_valid_records(frames)
        if len(sound) < len(indices):
            path, offset = self._paths[files[len(sound)]], int(begins[len(sound)])
            raise DataError(
                f"{path}: the record at offset {offset} is damaged: its checksum differs"
            )
        records = np.empty(len(indices), object)
        records[:] = sound
        return records

    def identity(self) -> dict[str, Any]:
        """Returns what describes the files: their names, and the number, the lengths and a sample of the records."""
        sample = np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(np.int64))
        records_checksum = zlib.crc32(
            b"".join(self.read_records(sample)), zlib.crc32(self._offsets.tobytes())
        )
        names = [os.path.basename(path) for path in self._paths]
        names_checksum = zlib.crc32("/".join(names).encode())
        return {
            "files": (
                f"{len(names)} from {names[0]} to {names[-1]}, checksum of their names"
                f" {names_checksum:08x}"
            ),
            "records": f"{len(self)}, checksum {records_checksum:08x}",
        }

    def _read_frames(
        self, path: str, places: list[tuple[int, int, int]], frames: list[bytes]
    ) -> None:
        """Puts the bytes of a file from `begin` to `end` into `frames` at `row`, for each of the places."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for row, begin, end in places:
                    frames[row] = os.pread(descriptor, end - begin, begin)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{path} cannot be read any more: {error.strerror}") from error


def find_matching_files(pattern: str | Sequence[str]) -> list[str]:
    """Returns the files of a path or glob, several separated by commas, or a list of those; sorted, each once.

    Raises:
      UsageError: for anything else, such as a dict of them by name, and for remote paths.
      DataError: when one of them matches no file.
    """
    if (
        not isinstance(pattern, (str, tuple, list))
        or not all(isinstance(one, str) for one in pattern)
        or not pattern
    ):
        raise UsageError(
            "input_path: TFRecordSource takes a path or glob, several separated by commas, or a"
            f" list of those; it got {pattern!r}; make one source for each name of a dict"
        )
    several = [pattern] if isinstance(pattern, str) else pattern
    patterns = [part.strip() for one in several for part in one.split(",") if part.strip()]
    for one in patterns:
        if is_remote(one):
            raise UsageError(
                f"input_path: {one} is remote, where a read of each single record would take too"
                " long; copy the files, or return a tf.data.TFRecordDataset from build_inputs"
            )
    found = [glob.glob(one) for one in patterns]
    missed = [one for one, files in zip(patterns, found, strict=True) if not files]
    if missed or not patterns:
        raise DataError(f"input_path: no file matches {', '.join(missed) or repr(pattern)}")
    return sorted(set(itertools.chain(*found)))


def read_compression(path: str) -> str:
    """Returns "GZIP" or "ZLIB" for a file that begins as a compressed one, and "" for any other.

    Raises:
      DataError: when the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            return _parse_compression(stream.read(_HEAD))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _read_offsets(path: str) -> np.ndarray:
    """Returns the offset of each record, then the file's length, as int64."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == 0:
                raise DataError(f"{path} is empty: no record at offset 0")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _check_uncompressed(path, content)
                return _walk(path, content, size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _walk(path: str, content: mmap.mmap, size: int) -> np.ndarray:
    offsets = array.array("q")
    unpack, add = struct.Struct("<Q").unpack_from, offsets.append
    offset, last = 0, size - _HEAD
    while offset <= last:
        add(offset)
        offset += _FRAME + unpack(content, offset)[0]
    _check_heads(path, content, np.frombuffer(offsets, np.int64))
    if offset != size:
        begin = offsets[-1] if offset > size else offset
        raise DataError(f"{path}: the record at offset {begin} is cut: the file ends at {size}")
    add(size)
    return np.frombuffer(offsets, np.int64)


def _check_uncompressed(path: str, content: mmap.mmap) -> None:
    """A compressed file has no record at its start, and no others that could be found."""
    if kind := _parse_compression(content[:_HEAD]):
        raise DataError(
            f"{path}: at offset 0 it is compressed ({kind}), so that no record can be found without"
            " reading all before it; write the file without compression, or return a"
            " tf.data.TFRecordDataset from build_inputs"
        )


def _parse_compression(head: bytes) -> str:
    """Returns the kind of compression that a file begins with; a length of a record may begin with the same bytes."""
    is_length = (
        len(head) >= _HEAD
        and _have_valid_checksums(np.frombuffer(head, np.uint8)[np.newaxis]).all()
    )
    return "" if is_length else _COMPRESSED.get(head[:2], "")


def _check_heads(path: str, content: mmap.mmap, offsets: np.ndarray) -> None:
    for begin in range(0, len(offsets), _CHECKED_AT_ONCE):
        some = offsets[begin : begin + _CHECKED_AT_ONCE]
        heads = np.frombuffer(content, np.uint8)[some[:, np.newaxis] + np.arange(_HEAD)]
        right = _have_valid_checksums(heads)
        if not right.all():
            offset = int(some[np.argmin(right)])
            raise DataError(
                f"{path}: at offset {offset} there is no record: the checksum of its length differs"
            )


def _have_valid_checksums(heads: np.ndarray) -> np.ndarray:
    """Returns whether the checksums fit, bool [n], for the first bytes of n frames, uint8 [n, 12]."""
    checksum = np.full(len(heads), 0xFFFFFFFF, np.uint32)
    for column in heads[:, :8].T:
        checksum = _TABLE[(checksum ^ column) & 0xFF] ^ (checksum >> 8)
    checksum = ~checksum
    masked = ((checksum >> 15) | (checksum << 17)) + np.uint32(0xA282EAD8)  # as TFRecord stores it
    return masked == np.ascontiguousarray(heads[:, 8:]).view("<u4")[:, 0]


def _table() -> np.ndarray:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_CASTAGNOLI), values >> 1).astype(
            np.uint32
        )
    return values


_TABLE = _table()


def _read_valid_records(frames: Sequence[bytes]) -> list[bytes]:
    """Returns the record in each frame, up to the first that is damaged."""
    records: list[bytes] = []
    descriptor = os.memfd_create("records", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(b"".join(frames))
        with contextlib.suppress(tf.errors.DataLossError):
            for record in _iterate_file_records(f"/proc/self/fd/{descriptor}"):
                records.append(record)
    finally:
        os.close(descriptor)
    return records
