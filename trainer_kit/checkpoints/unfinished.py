"""Marks checkpoints that a process is writing or removing, so that the files of a dead process are known to be its own.

`.saving-ckpt-<step>.<run id>` is an empty file in the folder of the checkpoints. It exists from before the first file
of a save until the record is written, and while a rotation removes a checkpoint. Files of a checkpoint with neither a
record nor a mark may belong to somebody else and are left alone. The mark is not forced to the disk: a power failure
may lose it, and then the files stay.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

from trainer_kit import files

_MARK = re.compile(r"\.saving-(ckpt-\d+)(?:\.(\w+))?")


def mark(prefixes: Iterable[str], run_id: str = "") -> None:
    """Marks checkpoints that are about to be written or removed; an error of the file system is ignored.

    Args:
      prefixes: The prefixes of the checkpoints.
      run_id: The run's identity; "" if it has none.
    """
    for prefix in prefixes:
        files.reach("checkpoint.mark", prefix)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            os.close(os.open(_path(prefix, run_id), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))


def unmark(prefixes: Iterable[str], run_id: str = "") -> None:
    """Removes the marks of checkpoints that are now whole or removed."""
    for prefix in prefixes:
        files.reach("checkpoint.unmark", prefix)
        with contextlib.suppress(OSError):
            os.remove(_path(prefix, run_id))


def marked(names: Iterable[str], run_id: str = "") -> dict[str, str]:
    """Returns checkpoint (`ckpt-<step>`) -> name of its mark, for the marks of this run among file names."""
    found = {name: match for name in names if (match := _MARK.fullmatch(name))}
    ours = {name: match for name, match in found.items() if not (match[2] and run_id) or match[2] == run_id}
    return {match[1]: name for name, match in ours.items()}


def _path(prefix: str, run_id: str) -> str:
    folder, name = os.path.split(prefix)
    return os.path.join(folder, f".saving-{name}{'.' * bool(run_id)}{run_id}")
