"""Commit records, and what they find out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.engine.checkpoints.small_run import SmallRun, flip_bit, names, parts
from trainer_kit.checkpoints.commit import describe_damage, read_commit_record, write_commit_record

DATA = "ckpt-1.data-00000-of-00001"
INDEX = "ckpt-1.index"
RECORD = "ckpt-1.commit.json"
ITERATOR = "ckpt-1.iterator.data-00000-of-00001"
ITERATOR_INDEX = "ckpt-1.iterator.index"
PARTS = (DATA, INDEX, ITERATOR, ITERATOR_INDEX)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A checkpoint that is whole."""
    SmallRun(tmp_path).train_to(1)
    assert names(tmp_path) == ["checkpoint", *parts(1)]
    return str(tmp_path / "ckpt-1")


def test_the_record_holds_sizes_checksums_and_further_entries(prefix: str) -> None:
    folder = Path(prefix).parent
    files = {name: (folder / name).read_bytes() for name in PARTS}
    expected = {
        name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in files.items()
    }

    record = read_commit_record(prefix) or {}

    assert record["files"] == expected
    assert record["time"] == pytest.approx((folder / INDEX).stat().st_mtime, abs=60)

    write_commit_record(prefix, info={"step": 1})

    assert read_commit_record(prefix) == {"files": expected, "info": {"step": 1}}
    assert describe_damage(prefix) == ""


def _cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _append_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut_file, "{} has {} bytes instead of {}"),
        (_append_byte, "{} has {} bytes instead of {}"),
        (flip_bit, "{} has a wrong checksum"),
        (Path.unlink, "{} is missing"),
    ],
)
def test_damage_of_any_file_is_told_by_name(
    prefix: str, name: str, damage: Callable[[Path], None], told: str
) -> None:
    path = Path(prefix).with_name(name)
    size = path.stat().st_size

    damage(path)

    assert describe_damage(prefix) == told.format(
        name, path.stat().st_size if path.exists() else 0, size
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"ckpt-1.index": 7}}',
        "\udcff",
    ],
)
def test_a_record_that_is_damaged_itself_condemns_nothing(prefix: str, text: str) -> None:
    Path(f"{prefix}.commit.json").write_bytes(text.encode(errors="surrogateescape"))

    assert describe_damage(prefix) == ""

    flip_bit(Path(prefix).with_name(DATA))

    assert describe_damage(prefix).startswith("it cannot be read (")


def test_a_missing_checkpoint_has_a_problem_and_no_record(tmp_path: Path) -> None:
    assert describe_damage(str(tmp_path / "ckpt-3")) == "ckpt-3.index is missing"
    assert read_commit_record(str(tmp_path / "ckpt-3")) is None


def test_files_of_several_shards_and_of_others_are_told_apart(tmp_path: Path) -> None:
    for name in (
        "ckpt-2.index",
        "ckpt-2.data-00000-of-00002",
        "ckpt-2.data-00001-of-00002",
        "ckpt-2.notes",
        "ckpt-20.index",
    ):
        (tmp_path / name).write_text(name)

    write_commit_record(str(tmp_path / "ckpt-2"))
    record = json.loads((tmp_path / "ckpt-2.commit.json").read_text())

    assert list(record["files"]) == [
        "ckpt-2.data-00000-of-00002",
        "ckpt-2.data-00001-of-00002",
        "ckpt-2.index",
    ]

    (tmp_path / "ckpt-2.data-00001-of-00002").unlink()

    assert describe_damage(str(tmp_path / "ckpt-2")) == "ckpt-2.data-00001-of-00002 is missing"


def test_a_plain_tensorflow_checkpoint_is_trusted_after_a_read(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(text=tf.Variable("a"), number=tf.Variable([1.0])).write(
        str(tmp_path / "ckpt-4")
    )

    assert describe_damage(path) == ""
