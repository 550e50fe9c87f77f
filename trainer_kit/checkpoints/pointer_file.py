"""TensorFlow's pointer file: which checkpoints a folder holds, and which is the newest."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

from trainer_kit import files
from trainer_kit.checkpoint_names import POINTER, pointer_text


class PointerFile:
    """The checkpoints that a manager knows of, as `tf.train.latest_checkpoint` and TensorFlow's manager read them.

    Args:
      folder: that holds the checkpoints.

    Attributes:
      newest: the prefix of the newest checkpoint, listed or not; None when there is none.
    """

    def __init__(self, folder: str) -> None:
        self.newest: str | None = None
        self._path = os.path.join(folder, POINTER)
        self._saved_at: dict[str, float] = {}
        self._made_at = time.time() - 1.0  # as TensorFlow's manager: what is saved at once is not from before

    @property
    def listed(self) -> list[str]:
        """The prefixes of the checkpoints in the file, the oldest first."""
        return list(self._saved_at)

    def follow(self, there: Collection[str], list_them: bool) -> None:
        """Takes the checkpoints that are there for the only ones; the next `add` or `drop` writes the file.

        Args:
          there: prefixes, in the order of steps.
          list_them: whether they are listed: not where another process removes them.
        """
        self.newest = list(there)[-1] if there else None
        self._saved_at = {path: os.path.getmtime(f"{path}.index") for path in there} if list_them else {}

    def add(self, prefix: str) -> None:
        """Makes a checkpoint that has just been saved the newest, and writes the file.

        Raises:
          StorageError: when it cannot be written.
        """
        self._saved_at.pop(prefix, None)  # one that was written over goes to the end
        self._saved_at[prefix] = time.time()
        self.newest = prefix
        self._write()

    def drop(self, prefixes: Iterable[str]) -> None:
        """Takes checkpoints off the list, and writes the file if one of them was on it.

        Raises:
          StorageError: when it cannot be written.
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
