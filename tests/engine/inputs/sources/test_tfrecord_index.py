"""The index of TFRecord files, and reading at its offsets; files are written by TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.builders import write_records
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.tfrecord_index import RecordFiles, find_matching_files

RECORDS = [b"first", b"", b"third with \0 inside\0", bytes(range(256)) * 40, b"last"]
FRAME = 16  # bytes around each record


def _compute_offset(index: int) -> int:
    return sum(len(record) + FRAME for record in RECORDS[:index])


def _spoil(path: str, offset: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def test_records_of_several_files_are_read_in_any_order(tmp_path: Path) -> None:
    paths = [
        write_records(tmp_path / "a", RECORDS),
        write_records(tmp_path / "b", [b"one"]),
        write_records(tmp_path / "c", RECORDS[::-1]),
    ]
    expected = [*RECORDS, b"one", *RECORDS[::-1]]

    files = RecordFiles(paths)

    assert len(files) == 11

    for indices in ([0], list(range(11)), [10, 0, 5, 5, 3, 9], []):
        assert files.read_records(np.array(indices, np.int64)).tolist() == [
            expected[index] for index in indices
        ]


def test_no_file_stays_open(tmp_path: Path) -> None:
    files = RecordFiles([write_records(tmp_path / str(index), RECORDS) for index in range(20)])
    before = len(os.listdir("/proc/self/fd"))

    files.read_records(np.arange(100))

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("cut", [1, 7, 11, 12, 15, 16, FRAME + len(RECORDS[-1]) - 1])
def test_a_cut_file_is_reported_with_the_records_offset(tmp_path: Path, cut: int) -> None:
    path = write_records(tmp_path / "a", RECORDS)
    os.truncate(path, _compute_offset(4) + cut)

    with pytest.raises(
        DataError,
        match=rf"^{path}: the record at offset {_compute_offset(4)} is cut: the file ends at",
    ):
        RecordFiles([path])


@pytest.mark.parametrize("byte", range(12))
@pytest.mark.parametrize("index", [0, 2])
def test_a_damaged_header_is_told_with_its_offset(tmp_path: Path, index: int, byte: int) -> None:
    path = write_records(tmp_path / "a", RECORDS)
    _spoil(path, _compute_offset(index) + byte)

    with pytest.raises(
        DataError,
        match=rf"^{path}: at offset {_compute_offset(index)} there is no record: the checksum",
    ):
        RecordFiles([path])


@pytest.mark.parametrize("place", [12, 14, -4, -1])
def test_only_reading_the_damaged_record_fails(tmp_path: Path, place: int) -> None:
    good = write_records(tmp_path / "good", [b"x"])
    path = write_records(tmp_path / "a", RECORDS)

    offset = _compute_offset(2) if place > 0 else _compute_offset(3)
    _spoil(path, offset + place)

    files = RecordFiles([good, path])

    whole_records = files.read_records(np.array([5, 4, 0, 1])).tolist()
    assert whole_records == [RECORDS[4], RECORDS[3], b"x", RECORDS[0]]

    with pytest.raises(
        DataError, match=rf"^{path}: the record at offset {_compute_offset(2)} is damaged"
    ):
        files.read_records(np.array([5, 3, 0]))


def test_a_file_that_changes_after_it_was_indexed_is_told(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a", RECORDS)
    files = RecordFiles([path])
    os.truncate(path, _compute_offset(3))

    with pytest.raises(
        DataError, match=rf"{path}: the record at offset {_compute_offset(3)} is damaged"
    ):
        files.read_records(np.array([0, 3]))

    os.remove(path)

    with pytest.raises(DataError, match=rf"{path} cannot be read any more: No such file"):
        files.read_records(np.array([0]))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_compressed_file_is_refused_with_what_to_do(tmp_path: Path, compression: str) -> None:
    path = write_records(tmp_path / "a", RECORDS * 5, compression)

    with pytest.raises(
        DataError,
        match=rf"^{path}: at offset 0 it is compressed \({compression}\).*write the file w",
    ):
        RecordFiles([path])


def test_every_form_of_pattern_gives_sorted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b-1", "a-2", "a-1", "c"):
        (tmp_path / name).touch()
    base = str(tmp_path)
    names = ["a-1", "a-2", "b-1"]
    expected = [f"{base}/{name}" for name in names]

    assert find_matching_files(f"{base}/?-*") == expected
    assert find_matching_files(f"{base}/b-1, {base}/a-*") == expected
    assert find_matching_files([f"{base}/b-*,{base}/a-2", f"{base}/a-*"]) == expected
    assert find_matching_files("~/b-1,~/a-*") == expected
    assert find_matching_files(f"{base}/c") == [f"{base}/c"]


def test_a_pattern_without_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    with pytest.raises(DataError, match=rf"no file matches {tmp_path}/x\*, {tmp_path}/y$"):
        find_matching_files(f"{tmp_path}/a,{tmp_path}/x*,{tmp_path}/y")

    with pytest.raises(DataError, match="no file matches ' , '"):
        find_matching_files(" , ")


@pytest.mark.parametrize("name", ["empty", "."])
def test_what_holds_no_record_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError):
        RecordFiles([str(tmp_path / name)])


@pytest.mark.parametrize("pattern", [{"images": "a*"}, "", (), [1], "gs://b/a*"])
def test_what_is_no_pattern_of_this_machine_is_refused(pattern: object) -> None:
    with pytest.raises(UsageError):
        find_matching_files(pattern)  # type: ignore[arg-type]


def test_the_identity_of_files_changes_with_names_and_records(tmp_path: Path) -> None:
    records = [b"%02d" % index for index in range(50)]
    paths = [write_records(tmp_path / "a", records), write_records(tmp_path / "b", records)]

    identity = RecordFiles(paths).identity()

    assert RecordFiles(paths).identity() == identity

    added = RecordFiles([*paths, write_records(tmp_path / "c", [b"more"])])
    assert added.identity().items().isdisjoint(identity.items())

    renamed = RecordFiles([paths[0], write_records(tmp_path / "d", records)]).identity()
    assert renamed["files"] != identity["files"]
    assert renamed["records"] == identity["records"]

    reordered = RecordFiles([write_records(tmp_path / "a", records[::-1]), paths[1]]).identity()
    assert reordered["files"] == identity["files"]
    assert reordered["records"] != identity["records"]
