"""Which checkpoint: the latest, the best, a step, or a path."""

from __future__ import annotations

import os
import re

import tensorflow as tf

from trainer_kit.checkpoints.best import read_info
from trainer_kit.errors import UsageError


def complete_checkpoints(directory: str) -> dict[int, str]:
    """Returns step -> prefix of the checkpoints in `directory` that have an index file, in the order of steps."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    found = {
        int(match.group(1)): os.path.join(directory, name.removesuffix(".index"))
        for name in names
        if (match := re.fullmatch(r"ckpt-(\d+)\.index", name))
    }
    return dict(sorted(found.items()))


def newest_checkpoint(directory: str) -> str | None:
    """Returns the prefix of the newest checkpoint: by TensorFlow's pointer file or, without one, by the step."""
    pointed = tf.train.latest_checkpoint(directory)
    if pointed:
        return str(pointed)
    there = list(complete_checkpoints(directory).values())
    return there[-1] if there else None


def select_checkpoint(model_dir: str, which: str, best_dir: str) -> str:
    """Returns the prefix that `which` means: `latest`, `best`, a step, or a path.

    Raises:
      UsageError: when there is no such checkpoint, with those that there are.
    """
    there = complete_checkpoints(model_dir)
    listed = f"there are the steps {', '.join(map(str, there))}" if there else f"{model_dir} holds no checkpoint"
    if which == "latest":
        newest = newest_checkpoint(model_dir)
        if newest is None:
            raise UsageError(f"nothing to evaluate: {listed}; train first, or give another --model_dir")
        return newest
    if which == "best":
        info = read_info(best_dir)
        if info is None:
            raise UsageError(f"no best checkpoint: {best_dir} holds none; {listed}")
        return os.path.join(best_dir, info["checkpoint"])
    if which.isdigit():
        if int(which) not in there:
            raise UsageError(f"no checkpoint of step {which}: {listed}")
        return there[int(which)]
    if not tf.io.gfile.exists(f"{which}.index"):
        raise UsageError(f"no checkpoint at {which}; give latest, best, a step or a path without .index; {listed}")
    return which
