"""Selects a checkpoint: the latest, the best, a step, or a path."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import tensorflow as tf

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import describe_damage, is_foreign
from trainer_kit.checkpoints.weight_files.keras_file import is_keras_file
from trainer_kit.errors import StorageError, UsageError, suggest_paths
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.process.run_directory import read_run_id

# The weights as the task initializes them
INITIAL = "initial"
_FILE = re.compile(r"\.(index|data-\d{5}-of-\d{5})$")
_LOG = logging.getLogger(__name__)


def find_newest_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the newest whole checkpoint.

    If no file has our names, it is the one in the pointer file. The pointer file is not reliable.
    After the death of a process it may be missing, incomplete or a step behind. In the folder of a
    run, checkpoints that another run saved do not count.

    Raises:
      StorageError: when there are checkpoints, but none is whole and belongs to this run.
    """
    prefixes = list(complete_checkpoints(directory).values())
    run_id = read_run_id(directory)
    for prefix in reversed(prefixes):
        if is_foreign(prefix, run_id):
            _LOG.warning("%s was saved by another run; it is not used", prefix)
        elif damage := describe_damage(prefix):
            _LOG.warning("%s is damaged: %s; it is not used", prefix, damage)
        else:
            return prefix

    try:
        pointer = tf.train.latest_checkpoint(directory)
    except (tf.errors.OpError, ValueError):
        pointer = None
    # The pointer file may name a checkpoint without our names.
    names = [os.path.basename(prefix) for prefix in prefixes]
    if pointer and os.path.basename(pointer) not in names:
        return str(pointer)
    if prefixes:
        raise StorageError(
            f"no checkpoint in {directory} is whole and belongs to this run; "
            "restore one from a backup"
        )
    return None


def find_folder_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the best checkpoint in a folder of best weights.

    In another folder, or if the best one is damaged, it is the newest one.

    Raises:
      StorageError: when there are checkpoints and all are damaged.
    """
    info = read_info(directory)
    if info is not None:
        best = os.path.join(directory, info["checkpoint"])
        if not describe_damage(best):
            return best
    return find_newest_checkpoint(directory)


def select_checkpoint(model_dir: str, which: str, best_dir: str) -> str:
    """Returns the prefix of the checkpoint that a user asks for.

    Args:
      model_dir: The folder of the run.
      which: `latest`, `best`, a step, `ckpt-<step>`, a path, or `initial`.
      best_dir: The folder of the best weights.

    Returns:
      The prefix, or "" for `initial`.

    Raises:
      UsageError: when there is no such checkpoint. The message lists the existing ones.
      StorageError: when `which` is `latest` and all checkpoints are damaged.
    """
    if which == INITIAL:
        return ""

    checkpoints = complete_checkpoints(model_dir)
    description = f"{model_dir} holds no checkpoint"
    if checkpoints:
        steps = ", ".join(map(str, checkpoints))
        description = f"there are the steps {steps}"
    # A Training job saves to a folder inside.
    inner = os.path.join(model_dir, "checkpoints")
    if not checkpoints and complete_checkpoints(inner):
        raise UsageError(f"{description}, but {inner} does; give that folder")

    if which == "latest":
        newest = find_newest_checkpoint(model_dir)
        if newest is None:
            raise UsageError(
                f"nothing to evaluate: {description}; train first, or give another model_dir, or "
                "ask for initial, the weights as the task initializes them"
            )
        return newest

    if which == "best":
        info = read_info(best_dir)
        if info is None:
            raise UsageError(f"there is no best checkpoint: {best_dir} holds none; {description}")
        return os.path.join(best_dir, info["checkpoint"])

    # A file of this name comes before a step.
    is_prefix = tf.io.gfile.exists(f"{which}.index")
    step = which if is_prefix else which.removeprefix("ckpt-")
    if step.isdigit():
        number = int(step)
        if number not in checkpoints:
            raise UsageError(f"there is no checkpoint of step {step}: {description}")
        return checkpoints[number]
    if not is_prefix:
        raise UsageError(
            f"there is no checkpoint at {which}; "
            "give latest, best, a step or a path without .index, or initial; "
            f"{description}"
        )
    return which


def resolve_weights_path(path: str) -> str:
    """Returns the path of the Keras file, or the prefix of the checkpoint, at a path.

    Args:
      path: A prefix, one of the files of a checkpoint, a file of Keras, a SavedModel, or a folder.
        Of a folder of best weights the best checkpoint is taken, of another one the newest.

    Raises:
      UsageError: when there is none. The message lists what exists.
      StorageError: when there are checkpoints and all are damaged.
    """
    if is_keras_file(path) and os.path.isfile(path):
        return path
    if tf.io.gfile.exists(f"{path}.index"):
        return path
    if tf.io.gfile.isdir(path):
        saved_model_path = os.path.join(path, "saved_model.pb")
        if tf.io.gfile.exists(saved_model_path):
            return os.path.join(path, "variables", "variables")
        if prefix := find_folder_checkpoint(path):
            return prefix
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        contents = ", ".join(names[:12]) or "nothing"
        raise UsageError(f"{path} holds no checkpoint; it holds: {contents}")
    if _FILE.search(path) and tf.io.gfile.exists(path):
        return _FILE.sub("", path)

    # A remote folder is not searched for similar names.
    advice = ""
    if "://" not in path:
        folder = Path(path).parent
        siblings = {_FILE.sub("", sibling.name) for sibling in folder.glob("*")}
        suggestion = suggest_paths(Path(path), sorted(siblings), "files")
        advice = f"; {suggestion}"
    raise UsageError(f"there is no checkpoint {path}{advice}")
