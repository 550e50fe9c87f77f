"""Finds where an error comes from, and which config value it is about."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

from trainer_kit import errors
from trainer_kit.errors import Mistake
from trainer_kit.errors.user_frames import is_users_file


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line, without the source locations that AutoGraph, Keras and TensorFlow add."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    inside_graph = lines and lines[0] == "in user code:"
    return (lines[-1] if inside_graph else lines[0]) if lines else type(error).__name__


def is_of_a_user(error: BaseException) -> bool:
    """Whether a user's code raised the error, itself or through Python, TensorFlow or Keras."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inside_graph = re.findall(r'File "([^"]+)", line', str(error))  # AutoGraph re-raises with the locations as text
    ours = os.path.dirname(os.path.dirname(errors.__file__))
    for place in reversed([*frames, *inside_graph]):
        if place.startswith(ours) or "/official/" in place:
            return False
        if is_users_file(place):
            return True
    return False


def unknown_value(error: Exception, section: Any, path: str) -> Mistake | None:
    """Returns a mistake for the config value that Model Garden looked up in vain (a KeyError); None for others."""
    if not isinstance(error, KeyError) or not error.args:
        return None
    place, key = traceback.extract_tb(error.__traceback__)[-1], error.args[0]
    leaves = _leaves(section.as_dict(), path)
    paths = [leaf for leaf, value in leaves if type(value) is type(key) and value == key]
    if "/official/" not in place.filename or not paths:
        return None
    where = f"official/{place.filename.rpartition('/official/')[2]}:{place.lineno}"
    return Mistake(" or ".join(paths), f"Model Garden does not know {key!r}", f"see {where}: {place.line}")


def _leaves(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value
