"""The text: Python's own library, in two parts that share no file. Imports no TensorFlow."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from trainer_kit import DataError

HELD_OUT = 20  # one file in so many
VOCABULARY = 128  # ASCII
# Folders without a line that someone wrote for this library, or with text that is unlike the rest:
# what was installed later, tests with their data, and tables that scripts have made.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
GENERATED = "_sysconfigdata"  # a file that differs from machine to machine begins so


def find_standard_library() -> Path:
    """Returns the folder of the standard library of this Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_source_files(folder: Path) -> list[str]:
    """Returns the names of the sources in `folder`, relative to it and sorted.

    Raises:
      DataError: when there is none.
    """
    names = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths = [
            Path(here, name)
            for name in files
            if name.endswith(".py") and not name.startswith(GENERATED)
        ]
        names += [path.relative_to(folder).as_posix() for path in paths]
    if not names:
        raise DataError(
            f"char_lm: there is no .py file in {folder}; "
            "run it with a Python that ships its sources, or give a folder of .py files: "
            "--params_override=task.folder=FOLDER"
        )
    return sorted(names)


def is_held_out(name: str) -> bool:
    """Whether the file of this name is for evaluation.

    A hash of the name decides, so that a file never changes sides.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT == 0


def read_text(folder: Path, held_out: bool) -> np.ndarray:
    """Returns the sources of one part, one after another.

    They are uint8 [characters], each below VOCABULARY.

    Characters outside ASCII, and bytes that are no UTF-8, become a question mark.

    Raises:
      DataError: when the part has no file.
    """
    names = [name for name in list_source_files(folder) if is_held_out(name) == held_out]
    if not names:
        purpose = "evaluation" if held_out else "training"
        raise DataError(
            f"char_lm: none of the files in {folder} is for {purpose}; "
            f"one in {HELD_OUT} is held out, so give a folder with more files"
        )
    texts = [
        (folder / name).read_bytes().decode("utf-8", "replace").encode("ascii", "replace")
        for name in names
    ]
    return np.frombuffer(b"".join(texts), np.uint8)


def cut_windows(text: np.ndarray, length: int, most: int = 0) -> np.ndarray:
    """Returns windows of `text`, uint8 [windows, length + 1].

    Each predicts `length` characters, and no character is predicted twice.

    Args:
      text: uint8 [characters].
      length: characters that a window predicts; it has one more, the first, only to read.
      most: how many windows, evenly spread over the text; 0: all.

    Raises:
      DataError: when the text is shorter than a window.
    """
    count = (len(text) - 1) // length
    if count < 1:
        raise DataError(f"char_lm: {len(text)} characters are too few for a window of {length} + 1")
    chosen = np.linspace(0, count - 1, most).astype(int) if 0 < most < count else np.arange(count)
    return text[chosen[:, None] * length + np.arange(length + 1)]
