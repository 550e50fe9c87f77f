"""Finds files that a Model Garden task's section names and that do not exist."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Any

from trainer_kit.errors import Mistake
from trainer_kit.files import is_remote

_PATTERNS = ("input_path",)
_NAMES = ("_path", "_file", "_dir", "_filename", "init_checkpoint")
_NO_FILE = ("", "dummy")  # "dummy" is Model Garden's name for made-up data


def missing_files(section: Any, path: str, told: str) -> list[Mistake]:
    """Returns a mistake for each value that names a file, or a pattern of files, that does not exist.

    Args:
      section: The section of a Model Garden task.
      path: The path of the section in the experiment.
      told: The text of the error. Remote files, which can be slow to check, count as missing if the text names them.
    """
    return [
        Mistake(named, _problem(value, told), f"set it to where {'they are' if _is_pattern(named) else 'it is'}")
        for named, value in _paths(section.as_dict(), path)
        if value not in _NO_FILE and _is_missing(value, told)
    ]


def _paths(values: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted path and the value of each entry that names files; several patterns are yielded one by one."""
    for key, value in values.items():
        inner = f"{path}.{key}"
        if isinstance(value, dict):
            yield from _paths(value, inner)
        elif str(key).endswith(_NAMES) or _is_pattern(inner):
            for item in value if isinstance(value, (list, tuple)) else [value]:
                parts = item.split(",") if isinstance(item, str) else ()
                yield from ((inner, part.strip()) for part in parts)


def _is_pattern(path: str) -> bool:
    return any(name in path.split(".") for name in _PATTERNS)


def _is_missing(value: str, told: str) -> bool:
    if is_remote(value):
        return value in told
    found = glob.glob(value) or glob.glob(f"{glob.escape(value)}.index")  # the latter for a checkpoint prefix
    return not found and not os.path.lexists(value)


def _problem(value: str, told: str) -> str:
    problem = f"no file matches {value!r}" if any(mark in value for mark in "*?") else f"there is no {value!r}"
    if not is_remote(value):
        return problem
    return f"{problem} that can be read ({told})"
