"""Writes TensorFlow's pointer file, which lists the checkpoints of a folder and names the newest."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

from trainer_kit import files
from trainer_kit.checkpoint_names import POINTER, pointer_text


class PointerFile:
    """The checkpoints of a manager, in the file that `tf.train.latest_checkpoint` and TensorFlow's manager read.

    Args:
      folder: The folder that holds the checkpoints.

    Attributes:
      newest: The prefix of the newest checkpoint, listed or not; None when there is none.
    """

    def __init__(self, folder: str) -> None:
        self.newest: str | None = None
        self._path = os.path.join(folder, POINTER)
        self._saved_at: dict[str, float] = {}
        self._made_at = time.time() - 1.0  # as in TensorFlow's manager, so that the first save is not older than this

    @property
    def listed(self) -> list[str]:
        """The prefixes of the checkpoints in the file, the oldest first."""
        return list(self._saved_at)

    def follow(self, there: Collection[str], list_them: bool) -> None:
        """Replaces the list by the checkpoints of the folder; the next `add` or `drop` writes the file.

        Args:
          there: The prefixes, in the order of steps.
          list_them: Whether to list them; False where another process removes them.
        """
        self.newest = list(there)[-1] if there else None
        self._saved_at = {path: os.path.getmtime(f"{path}.index") for path in there} if list_them else {}

    def add(self, prefix: str) -> None:
        """Adds a checkpoint that was just saved as the newest, and writes the file.

        Raises:
          StorageError: when the file cannot be written.
        """
        self._saved_at.pop(prefix, None)  # one that was written over goes to the end
        self._saved_at[prefix] = time.time()
        self.newest = prefix
        self._write()

    def drop(self, prefixes: Iterable[str]) -> None:
        """Removes checkpoints from the list, and writes the file if one of them was listed.

        Raises:
          StorageError: when the file cannot be written.
        """
        before = len(self._saved_at)
        for prefix in prefixes:
            self._saved_at.pop(prefix, None)
        if 0 < len(self._saved_at) < before:
            self._write()

    def _write(self) -> None:
        names = [os.path.basename(path) for path in self._saved_at]
        text = pointer_text(names, list(self._saved_at.values()), self._made_at)
        files.write_text(self._path, text, "checkpoint.pointer_file")
