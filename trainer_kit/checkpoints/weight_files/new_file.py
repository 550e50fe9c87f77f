"""Writes new files of weights: never over an existing one, and complete or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.folder_identity import make_folder


@contextlib.contextmanager
def new_file(output: str) -> Iterator[str]:
    """Yields a path to write to; then gives what was written there, the file or files of a prefix, the name `output`.

    The files of a checkpoint are renamed one by one, the index last, since a checkpoint without it does not exist.

    Args:
      output: The path of the new file, or the prefix of the new checkpoint, without a slash at its end.

    Raises:
      UsageError: when it exists already.
      StorageError: when it cannot be written.
    """
    folder, name = os.path.split(os.path.abspath(output))
    _check_new(output)
    try:
        make_folder(folder)
        place = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
        try:
            yield os.path.join(place, name)
            _check_new(output)  # it may have appeared meanwhile
            for path in sorted(os.listdir(place), key=lambda path: (path.endswith(".index"), path)):
                os.rename(os.path.join(place, path), os.path.join(folder, path))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror or error}") from error


def _check_new(output: str) -> None:
    there = [path for path in (output, *glob.glob(f"{glob.escape(output)}.*")) if os.path.exists(path)]
    if there:
        raise UsageError(f"--output: {there[0]} exists, and no file is overwritten; give another path")
