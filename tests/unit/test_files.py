"""Atomic writes, appended records, and folders that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_kit import files
from trainer_kit.errors import ExitCode, StorageError


class Crash(BaseException):
    """Stands for a process that dies: nothing catches it."""


@pytest.fixture
def points() -> Iterator[list[tuple[str, str]]]:
    """The write points that are reached, in order."""
    reached: list[tuple[str, str]] = []

    def record_point(point: str, path: str) -> None:
        reached.append((point, path))

    files.on_write_point = record_point

    yield reached

    files.on_write_point = None


def test_remote_paths_have_a_scheme() -> None:
    assert files.is_remote("gs://bucket/x")
    assert files.is_remote("s3://bucket")
    assert not files.is_remote("/a/b")
    assert not files.is_remote(Path("a:b"))


def test_links_are_followed_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    link = tmp_path / "latest"

    link.symlink_to("run")

    assert files.follow_links(str(link)) == os.path.realpath(folder)
    assert files.follow_links(os.path.relpath(folder)) == os.path.realpath(folder)
    assert files.follow_links("~/run") == os.path.realpath(os.path.expanduser("~/run"))
    assert files.follow_links("gs://bucket/run") == "gs://bucket/run"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("~/runs/a", "/home/me/runs/a"),
        ("--model_dir=~/runs/a", "--model_dir=/home/me/runs/a"),
        ("--params_override=a.b=~/x,c.d=~/y", "--params_override=a.b=/home/me/x,c.d=/home/me/y"),
        ("~/a*,b,~/c", "/home/me/a*,b,/home/me/c"),
        ("~", "~"),
        ("~other/a", "~other/a"),
        ("runs/~/a", "runs/~/a"),
        ("gs://bucket/~/a", "gs://bucket/~/a"),
    ],
)
def test_the_home_is_expanded_where_a_path_begins(
    text: str, expanded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert files.expand_argument(text) == expanded


def test_a_path_that_the_locale_cannot_hold_is_refused_in_a_line(tmp_path: Path) -> None:
    locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = (
        "import sys; from trainer_kit.files import follow_links; "
        "follow_links(sys.argv[1] or 'r\\xe9')"
    )
    for path in ("", f"{tmp_path}/r\xe9"):  # in the program, or as an argument
        ended = subprocess.run(
            [sys.executable, "-c", program, path], env=locale, capture_output=True, text=True
        )
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("trainer_kit.errors.UsageError: ") and last.endswith(
            "set LC_ALL=C.UTF-8"
        ), ended.stderr


def test_text_is_written_in_utf_8_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here" / "a.txt"

    files.write_text(path, "first, and longer")
    files.write_text(path, "é")

    assert path.read_bytes() == "é".encode()
    assert os.listdir(path.parent) == ["a.txt"]


def test_json_is_written_with_a_last_newline(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": [1, None], "a": 0.1})
    text = (tmp_path / "a.json").read_text()

    assert json.loads(text) == {"b": [1, None], "a": 0.1}
    assert text.endswith("}\n")
    assert text.index('"b"') < text.index('"a"')


def test_a_write_goes_through_its_named_points(
    tmp_path: Path, points: list[tuple[str, str]]
) -> None:
    files.write_text(tmp_path / "a.txt", "x", point="ledger")

    assert [point for point, _ in points] == ["ledger.open", "ledger.flush", "ledger.rename"]
    assert points[-1][1] == str(tmp_path / "a.txt")


@pytest.mark.parametrize("fatal", ["file.open", "file.flush", "file.rename"])
def test_a_crash_at_any_point_leaves_the_old_file_whole(tmp_path: Path, fatal: str) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def crash(point: str, _: str) -> None:
        if point == fatal:
            raise Crash

    files.on_write_point = crash

    try:
        with pytest.raises(Crash):
            files.write_text(path, "new")
    finally:
        files.on_write_point = None

    assert path.read_text() == "old"

    files.write_text(path, "new")

    assert path.read_text() == "new"


def test_a_disk_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(point: str, _: str) -> None:
        if point == "file.flush":
            raise OSError(28, "No space left on device")

    files.on_write_point = fail

    try:
        with pytest.raises(StorageError, match="No space left") as caught:
            files.write_text(path, "new")
    finally:
        files.on_write_point = None

    assert caught.value.exit_code == ExitCode.STORAGE
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "made" / "log.jsonl"

    assert list(files.read_json_lines(path)) == []

    for step in range(3):
        files.append_json_line(path, {"step": step})

    assert [record["step"] for record in files.read_json_lines(path)] == [0, 1, 2]


def test_only_the_line_that_a_crash_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    files.append_json_line(path, {"step": 0})

    with open(path, "a") as stream:
        stream.write('{"step": 1, "lo')

    assert [record["step"] for record in files.read_json_lines(path)] == [0]

    files.append_json_line(path, {"step": 2})
    with open(path, "ab") as raw:
        raw.write(b"[1, 2]\n\xff\xfe\n\n")

    files.append_json_line(path, {"step": 3})

    assert [record["step"] for record in files.read_json_lines(path)] == [0, 2, 3]


def test_a_place_that_is_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")

    for act in (
        lambda: files.write_text(tmp_path / "a" / "b.txt", "x"),
        lambda: files.append_json_line(tmp_path / "a" / "b.jsonl", {}),
        lambda: files.check_writable(tmp_path / "a" / "b"),
        lambda: files.check_writable(tmp_path / "a"),
    ):
        with pytest.raises(StorageError, match="a"):
            act()


def test_a_folder_that_can_be_made_is_writable_and_is_not_made(tmp_path: Path) -> None:
    files.check_writable(tmp_path)
    files.check_writable(tmp_path / "b" / "c")

    assert os.listdir(tmp_path) == []


def test_a_folder_of_the_system_is_not_writable() -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        files.check_writable("/proc/run")


def test_a_json_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"a": [1, None]})

    assert files.read_json(tmp_path / "a.json") == {"a": [1, None]}
    assert files.read_json(tmp_path) is None

    os.mkfifo(tmp_path / "pipe.json")

    assert files.read_json(tmp_path / "pipe.json") is None


DAMAGED = {
    "a number of 5,000 digits": b'{"step": ' + b"1" * 5000 + b"}",
    "deep nesting": b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nesting that JSON can still be read with": b'{"step": 1, "metrics": '
    + b'{"a":' * 600
    + b"1"
    + b"}" * 601,
    "null": b"null",
    "a list": b"[1]",
    "bytes that are no text": b"\xff\xfe\x00",
    "cut": b'{"step": 1',
    "nothing": b"",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_record_is_none_and_a_damaged_line_is_left_out(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "record.json"

    path.write_bytes(DAMAGED[kind])

    assert files.read_json(path) is None

    path.write_bytes(b'{"step": 0}\n' + DAMAGED[kind] + b'\n{"step": 2}\n')

    assert [record["step"] for record in files.read_json_lines(path)] == [0, 2]


def test_a_folder_in_the_place_of_a_file_of_lines_is_told(tmp_path: Path) -> None:
    assert files.read_json(tmp_path) is None
    with pytest.raises(StorageError, match="cannot be read: Is a directory"):
        list(files.read_json_lines(tmp_path))


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes | None]]:
    """The files and folders that were flushed to disk, with the contents at that moment."""
    syncs: list[tuple[str, bytes | None]] = []

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        syncs.append((path.name, None if path.is_dir() else path.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)

    return syncs


def test_a_file_is_on_disk_whole_before_it_has_its_name(
    tmp_path: Path, syncs: list[tuple[str, bytes | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[list[tuple[str, bytes | None]]] = []
    replace = os.replace

    monkeypatch.setattr(
        os, "replace", lambda *paths: (renamed.append(list(syncs)), replace(*paths))
    )
    files.write_text(tmp_path / "a.txt", "whole")

    assert [content for _, content in renamed[0]] == [b"whole"]


def test_an_appended_record_and_the_names_in_a_folder_are_kept(
    tmp_path: Path, syncs: list[tuple[str, bytes | None]]
) -> None:
    files.append_json_line(tmp_path / "a.jsonl", {"step": 1})

    files.flush_folder(tmp_path)

    assert syncs == [("a.jsonl", b'{"step": 1}\n'), (tmp_path.name, None)]
