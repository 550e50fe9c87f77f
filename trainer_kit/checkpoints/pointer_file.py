"""TensorFlow's pointer file, which lists the checkpoints of a folder and names the newest, for other programs.

The file follows from the folder. It may be missing, incomplete or a step behind after the death of a process, so
trainer_kit reads it only to learn which checkpoints once existed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

from trainer_kit import files
from trainer_kit.checkpoint_names import POINTER, complete_checkpoints, pointer_text

_LISTED = re.compile(r'^(?:all_)?model_checkpoint_paths?: "(?:.*/)?(ckpt-\d+)"$', re.MULTILINE)


def listed_names(directory: str) -> list[str]:
    """Returns the names of the checkpoints in the pointer file, the newest first, whether they exist or not."""
    return _LISTED.findall(_read(directory))


def write_pointer(directory: str, without: Collection[str] = ()) -> None:
    """Makes the pointer file list the complete checkpoints, the newest last.

    It writes only if needed, and removes the file when there is no checkpoint.

    Args:
      directory: The folder of the checkpoints.
      without: The prefixes of checkpoints to leave out, such as those that are about to be removed.

    Raises:
      StorageError: when the file cannot be written.
    """
    path = os.path.join(directory, POINTER)
    prefixes = [prefix for prefix in complete_checkpoints(directory).values() if prefix not in without]
    names = [os.path.basename(prefix) for prefix in prefixes]
    text = _read(directory)
    if not names:
        if text:
            os.remove(path)
    elif not text.endswith("\n") or _LISTED.findall(text) != [names[-1], *names]:
        times = [os.path.getmtime(f"{prefix}.index") for prefix in prefixes]
        # As in TensorFlow's manager: it removes only checkpoints that were saved after the preserved time.
        preserved = min(min(times), time.time()) - 1.0
        files.write_text(path, pointer_text(names, times, preserved), "checkpoint.pointer_file")


def _read(directory: str) -> str:
    try:
        with open(os.path.join(directory, POINTER), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
