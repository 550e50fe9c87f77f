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

INITIAL = "initial"  # the weights as the task initializes them
_FILE = re.compile(r"\.(index|data-\d{5}-of-\d{5})$")
_LOG = logging.getLogger(__name__)


def find_newest_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the newest whole checkpoint; if no file has our names, the one in the pointer file.

    The pointer file is not reliable: after the death of a process it may be missing, incomplete or
    a step behind. In the folder of a run, checkpoints that another run saved do not count.

    Raises:
      StorageError: when there are checkpoints, but none is whole and belongs to this run.
    """
    there, run_id = list(complete_checkpoints(directory).values()), read_run_id(directory)
    for prefix in reversed(there):
        if is_foreign(prefix, run_id):
            _LOG.warning("%s was saved by another run; it is not used", prefix)
        elif not (wrong := describe_damage(prefix)):
            return prefix
        else:
            _LOG.warning("%s is damaged: %s; it is not used", prefix, wrong)
    try:
        pointed = tf.train.latest_checkpoint(directory)
    except (tf.errors.OpError, ValueError):
        pointed = None
    if pointed and os.path.basename(pointed) not in map(os.path.basename, there):
        return str(pointed)
    if there:
        raise StorageError(
            f"no checkpoint in {directory} is whole and belongs to this run; restore one from a"
            " backup"
        )
    return None


def find_folder_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the best checkpoint in a folder of best weights, or the newest one in another folder.

    Raises:
      StorageError: when there are checkpoints and all are damaged.
    """
    info = read_info(directory)
    best = os.path.join(directory, info["checkpoint"]) if info is not None else ""
    return best if best and not describe_damage(best) else find_newest_checkpoint(directory)


def select_checkpoint(model_dir: str, which: str, best_dir: str) -> str:
    """Returns the prefix for `which`: `latest`, `best_dir`, a step, `ckpt-<step>`, or a path; "" for `initial`.

    Raises:
      UsageError: when there is no such checkpoint; the message lists the existing ones.
      StorageError: when `which` is `latest` and all checkpoints are damaged.
    """
    if which == INITIAL:
        return ""
    there = complete_checkpoints(model_dir)
    listed = (
        f"there are the steps {', '.join(map(str, there))}"
        if there
        else f"{model_dir} holds no checkpoint"
    )
    if not there and complete_checkpoints(
        inner := os.path.join(model_dir, "checkpoints")
    ):  # of a Training job
        raise UsageError(f"{listed}, but {inner} does; give that folder")
    if which == "latest":
        newest = find_newest_checkpoint(model_dir)
        if newest is None:
            raise UsageError(
                f"nothing to evaluate: {listed}; train first, or give another model_dir, or "
                "ask for initial, the weights as the task initializes them"
            )
        return newest
    if which == "best":
        info = read_info(best_dir)
        if info is None:
            raise UsageError(f"there is no best checkpoint: {best_dir} holds none; {listed}")
        return os.path.join(best_dir, info["checkpoint"])
    step = which if tf.io.gfile.exists(f"{which}.index") else which.removeprefix("ckpt-")
    if step.isdigit():
        if int(step) not in there:
            raise UsageError(f"there is no checkpoint of step {step}: {listed}")
        return there[int(step)]
    if not tf.io.gfile.exists(f"{which}.index"):
        raise UsageError(
            f"there is no checkpoint at {which}; give latest, best, a step or a path without"
            f" .index, or initial; {listed}"
        )
    return which


def resolve_weights_path(path: str) -> str:
    """Returns the path of the Keras file, or the prefix of the checkpoint, at a path.

    Args:
      path: A prefix, one of the files of a checkpoint, a file of Keras, a SavedModel, or a folder:
        of a folder of best weights the best checkpoint is taken, else the newest.

    Raises:
      UsageError: when there is none; the message lists what there is.
      StorageError: when there are checkpoints and all are damaged.
    """
    if is_keras_file(path) and os.path.isfile(path):
        return path
    if tf.io.gfile.exists(f"{path}.index"):
        return path
    if tf.io.gfile.isdir(path):
        if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
            return os.path.join(path, "variables", "variables")
        if found := find_folder_checkpoint(path):
            return found
        there = sorted(os.listdir(path)) if os.path.isdir(path) else []
        raise UsageError(
            f"{path} holds no checkpoint; it holds: {', '.join(there[:12]) or 'nothing'}"
        )
    if _FILE.search(path) and tf.io.gfile.exists(path):
        return _FILE.sub("", path)
    known = sorted({_FILE.sub("", one.name) for one in Path(path).parent.glob("*")})
    advice = "" if "://" in path else f"; {suggest_paths(Path(path), known, 'files')}"
    raise UsageError(f"there is no checkpoint {path}{advice}")
