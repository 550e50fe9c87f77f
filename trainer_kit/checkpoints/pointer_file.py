"""TensorFlow's pointer file, which lists the checkpoints of a folder and names the newest.

It is for other programs. The file follows from the folder. It may be missing, incomplete or a step
behind after the death of a process, so trainer_kit reads it only to learn which checkpoints once
existed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from trainer_kit import files
from trainer_kit.checkpoint_names import POINTER_FILE

_LISTED = re.compile(r'^(?:all_)?model_checkpoint_paths?: "(?:.*/)?(ckpt-\d+)"$', re.MULTILINE)


def read_checkpoint_names(directory: str) -> list[str]:
    """Returns the names of the checkpoints in the pointer file, the newest first.

    The checkpoints need not exist.
    """
    text = _read_pointer_text(directory)
    return _LISTED.findall(text)


def write_pointer(
    directory: str, prefixes: Sequence[str], point: str = "checkpoint.pointer_file"
) -> None:
    """Makes the pointer file list the checkpoints `prefixes`. It is written only if needed.

    Args:
      directory: The folder of the checkpoints.
      prefixes: The checkpoints. The last is the one that `tf.train.latest_checkpoint` finds.
        Without any the file is removed.
      point: The name under which fault injection knows the file.

    Raises:
      StorageError: when the file cannot be written.
    """
    path = os.path.join(directory, POINTER_FILE)
    text = _read_pointer_text(directory)
    names = [os.path.basename(prefix) for prefix in prefixes]
    if not names:
        if text:
            os.remove(path)
        return
    # The newest is named once more, in the first line.
    newest_name = names[-1]
    listed_names = [newest_name, *names]
    is_whole = text.endswith("\n")
    if is_whole and _LISTED.findall(text) == listed_names:
        return

    # TensorFlow's manager removes only checkpoints that were saved after the preserved time.
    save_times = [os.path.getmtime(f"{prefix}.index") for prefix in prefixes]
    earliest_time = min(*save_times, time.time())
    preserved_time = earliest_time - 1.0
    lines = [
        f'model_checkpoint_path: "{newest_name}"',
        *(f'all_model_checkpoint_paths: "{name}"' for name in names),
        *(f"all_model_checkpoint_timestamps: {save_time!r}" for save_time in save_times),
        f"last_preserved_timestamp: {preserved_time!r}",
    ]
    files.write_text(path, "\n".join(lines) + "\n", point)


def _read_pointer_text(directory: str) -> str:
    path = os.path.join(directory, POINTER_FILE)
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
