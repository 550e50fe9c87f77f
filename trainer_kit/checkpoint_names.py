"""The names of checkpoints and of their files. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable

from trainer_kit.errors import UsageError

RECORD_SUFFIX = ".commit.json"
# TensorFlow's file, which names the checkpoint of a folder that `latest_checkpoint` returns
POINTER_FILE = "checkpoint"
# In the names of files with the state of a tf.data iterator, or `.iterator-<n>` of several
ITERATOR_SUFFIX = ".iterator"
# The folder in which TensorFlow creates the files
TEMPORARY_NAME_PATTERN = re.compile(r"(ckpt-\d+)(\.iterator(-\d+)?)?_temp")
_FILE = re.compile(
    r"(ckpt-\d+)\.(?:iterator(?:-\d+)?\.)?(?:index|data-\d{5}-of-\d{5})|(ckpt-\d+)\.commit\.json"
)


def parse_checkpoint_name(file_name: str) -> str | None:
    """Returns the name, `ckpt-<step>`, of the checkpoint that a file belongs to.

    Returns None for any other file.
    """
    match = _FILE.fullmatch(file_name)
    return (match.group(1) or match.group(2)) if match else None


def list_checkpoint_files(prefix: str) -> list[str]:
    """Returns the sorted paths of the files of the checkpoint `prefix`.

    The commit record is included.
    """
    name = os.path.basename(prefix)
    return [
        path
        for path in sorted(glob.glob(f"{glob.escape(prefix)}.*"))
        if parse_checkpoint_name(os.path.basename(path)) == name
    ]


def parse_step(prefix: str) -> int:
    """Returns the step in the name of a checkpoint, `ckpt-<step>`."""
    return int(prefix.rpartition("-")[2])


def complete_checkpoints(directory: str) -> dict[int, str]:
    """Returns the prefixes of the checkpoints in `directory` by step, in the order of steps.

    Checkpoints without an index file are left out.

    Args:
      directory: A local folder. A missing one contains no checkpoints.
    """
    names: list[str] = []
    if os.path.isdir(directory):
        # The folder may be moved in between.
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(directory)

    checkpoints = [
        checkpoint
        for name in names
        if (checkpoint := parse_checkpoint_name(name)) and name == f"{checkpoint}.index"
    ]
    return {
        parse_step(checkpoint): os.path.join(directory, checkpoint)
        for checkpoint in sorted(checkpoints, key=parse_step)
    }


def check_step_exists(step: int, existing_steps: Iterable[int]) -> None:
    """Checks that the step of --from_step exists.

    Raises:
      UsageError: when `step` is not among `existing_steps`. The message lists them.
    """
    steps = sorted(existing_steps)
    if step in steps:
        return

    description = "model_dir holds no checkpoint"
    if steps:
        description = f"there are: {', '.join(map(str, steps))}"
    raise UsageError(
        f"--from_step: there is no checkpoint of step {step}; {description}; give 0 to start again"
    )
