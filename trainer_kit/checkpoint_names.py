"""The names of checkpoints and of their files. No TensorFlow."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence

from trainer_kit.errors import UsageError

RECORD = ".commit.json"
POINTER = "checkpoint"  # TensorFlow's file, which names the checkpoint of a folder that `latest_checkpoint` returns
ITERATOR = ".iterator"  # in the names of files that hold the state of a tf.data iterator; -<n> where there are several
UNFINISHED = re.compile(r"ckpt-\d+(\.iterator(-\d+)?)?_temp")  # the folder in which TensorFlow makes the files
_FILE = re.compile(r"(ckpt-\d+)\.(?:iterator(?:-\d+)?\.)?(?:index|data-\d{5}-of-\d{5})|(ckpt-\d+)\.commit\.json")


def owner(file_name: str) -> str | None:
    """Returns the name of the checkpoint, `ckpt-<step>`, whose file this is; None for any other file."""
    match = _FILE.fullmatch(file_name)
    return (match.group(1) or match.group(2)) if match else None


def own_files(prefix: str) -> list[str]:
    """Returns the paths of the files that belong to the checkpoint `prefix`, record included, sorted."""
    name = os.path.basename(prefix)
    return [path for path in sorted(glob.glob(f"{glob.escape(prefix)}.*")) if owner(os.path.basename(path)) == name]


def step_of(prefix: str) -> int:
    """Returns the step in the name of a checkpoint, `ckpt-<step>`."""
    return int(prefix.rpartition("-")[2])


def complete_checkpoints(directory: str) -> dict[int, str]:
    """Returns step -> prefix of the checkpoints in `directory` that have an index file, in the order of steps.

    Args:
      directory: a local folder; one that is missing holds none.
    """
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [checkpoint for name in names if (checkpoint := owner(name)) and name == f"{checkpoint}.index"]
    return {step_of(checkpoint): os.path.join(directory, checkpoint) for checkpoint in sorted(found, key=step_of)}


def require_step(step: int, there: Iterable[int]) -> None:
    """Raises UsageError, with those that exist, when --from_step names a checkpoint that is not among `there`."""
    steps = sorted(there)
    if step not in steps:
        listed = f"there are: {', '.join(map(str, steps))}" if steps else "model_dir holds no checkpoint"
        raise UsageError(f"--from_step: there is no checkpoint of step {step}; {listed}; give 0 to start again")


def pointer_text(names: Sequence[str], times: Sequence[float] = (), preserved: float | None = None) -> str:
    """Returns what TensorFlow's pointer file says of checkpoints in its own folder.

    Args:
      names: `ckpt-<step>`, at least one; the last is the one that `tf.train.latest_checkpoint` returns.
      times: when each was saved, in seconds since 1970. TensorFlow's manager, when it goes on in the folder, removes
        only checkpoints whose time is known.
      preserved: the time up to which TensorFlow's manager keeps checkpoints for ever; None: it is not said.
    """
    lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in times]
    lines += [] if preserved is None else [f"last_preserved_timestamp: {preserved!r}"]
    return "\n".join(lines) + "\n"
