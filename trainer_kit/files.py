"""Local files: atomic writes with named write points, and appended records.

A write creates a temporary file in the same folder, flushes it to disk and renames it. A reader
therefore sees the old file or the new one, never a part of either. This module does not import
TensorFlow and handles local paths only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer_kit.errors import StorageError, UsageError

# Levels of a record. Walking a deeper one might exceed Python's recursion limit.
_MAX_JSON_DEPTH = 100

# Called with (write point, path) just before each step of a write. Only fault injection sets it.
on_write_point: Callable[[str, str], None] | None = None


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names an object store (`gs://...`) rather than a local file."""
    return "://" in os.fspath(path)


def expand_home(value: Any) -> Any:
    """Returns a text that begins with ~/ with the home of the user in place of the `~`.

    Any other value is returned as it is.
    """
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return value


def expand_argument(text: str) -> str:
    """Returns an argument of a command with the home of the user in place of `~`.

    Shells expand it only at the beginning of a word. A path may also begin after a comma and after
    an equals sign, as in --model_dir=~/runs/a.
    """
    parts = re.split(r"([,=])", text)
    return "".join(map(expand_home, parts))


def follow_links(folder: str) -> str:
    """Returns the absolute path of `folder` without symbolic links.

    A leading `~` is the home of the user. Neither a link that is redirected during a run, such as
    `runs/latest`, nor os.chdir in the user's code then redirects the run. A remote folder is
    unchanged.

    Raises:
      UsageError: when the path is not ASCII and the locale is.
    """
    if not folder or is_remote(folder):
        return folder
    try:
        path = os.path.realpath(os.path.expanduser(folder))
        path.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{folder!a}: this locale has no UTF-8 for such paths; set LC_ALL=C.UTF-8"
        ) from error
    return path


def write_text(path: str | os.PathLike[str], text: str, point: str = "file") -> None:
    """Replaces the file at `path` by `text` (UTF-8), atomically; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), point)


def write_bytes(path: str | os.PathLike[str], content: bytes, point: str = "file") -> None:
    """Replaces the file at `path` by `content`, atomically; creates the folder if it is missing.

    Args:
      path: A local path.
      content: The new content.
      point: The name of this write point for fault injection.

    Raises:
      StorageError: when the folder or the file cannot be written.
    """
    target = Path(path)
    try:
        os.makedirs(target.parent, exist_ok=True)
        _replace(target, content, point)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error


def write_json(path: str | os.PathLike[str], value: object, point: str = "file") -> None:
    """Replaces the file at `path` by `value` as indented JSON, atomically; see `write_bytes`.

    NaN and infinity are written as in JavaScript.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n", point)


def append_json_line(
    path: str | os.PathLike[str], record: dict[str, Any], point: str = "line"
) -> None:
    """Appends `record` as one JSON line, flushed to disk.

    `read_json_lines` drops a line that a crash has cut.

    Args:
      path: A local path. The file and its folder are created if they are missing.
      record: A record of values that JSON can represent.
      point: The name of this write point for fault injection.

    Raises:
      StorageError: when the file cannot be written.
    """
    target = Path(path)
    try:
        os.makedirs(target.parent, exist_ok=True)
        report_write_point(f"{point}.append", target)
        with open(target, "ab+") as stream:
            # A line that a crash has cut gets an end, so that the record starts a new line.
            stream.seek(0, os.SEEK_END)
            if stream.tell() > 0:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")

            stream.write(json.dumps(record).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the records of a file of JSON lines, without damaged lines.

    Yields nothing if the file does not exist.

    Raises:
      StorageError: when the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    record = parse_json(line)
                    if isinstance(record, dict):
                        yield record
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(
            f"{os.fspath(path)} cannot be read: {error.strerror or error}"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of JSON text.

    All readers of records use this function, so that damage is one kind of error.

    Args:
      text: The text. Bytes are read as UTF-8, and invalid bytes are replaced.

    Raises:
      ValueError: when the text is not JSON, is nested too deeply, or has a number with more digits
        than Python reads.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

    # Each pass replaces the values of a level by those of the next level.
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        items: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                items.extend(container.values())
            elif isinstance(container, list):
                items.extend(container)
        if not items:
            return value
        level = items
    raise ValueError("it is nested too deeply")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the JSON object in the file at `path`; None if the file or the object is missing."""
    # A FIFO would block the reader.
    if not os.path.isfile(path):
        return None
    try:
        value = parse_json(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def flush_folder(folder: str | os.PathLike[str]) -> None:
    """Flushes the file names in `folder` to disk after renames, if the system can do it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def flush_tree(folder: str | os.PathLike[str]) -> None:
    """Flushes all files in `folder`, and their names, to disk before the folder gets its name.

    Raises:
      OSError: when a file cannot be read.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as stream:
                os.fsync(stream.fileno())
        flush_folder(parent)


def report_write_point(point: str, path: str | os.PathLike[str]) -> None:
    """Reports to fault injection that the write point `point` comes next, on the file at `path`."""
    if on_write_point is not None:
        on_write_point(point, os.fspath(path))


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raises StorageError unless files can be created in `folder`.

    If the folder is missing, its nearest existing parent is checked.
    """
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise StorageError(f"{folder} cannot be used: {existing} is a file, not a folder")

    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error} ({existing})"
        ) from error


def _replace(target: Path, content: bytes, point: str) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    report_write_point(f"{point}.open", temporary)
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            report_write_point(f"{point}.flush", temporary)
            stream.flush()
            os.fsync(stream.fileno())
        report_write_point(f"{point}.rename", target)
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
