"""What an evaluation leaves as files, and the checkpoints of a run: read for their step, or removed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoint_names import RECORD, UNFINISHED, owner
from trainer_kit.compat.model_garden.files.text_files import write_text
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.training.metrics import to_numpy

_LOG = logging.getLogger(__name__)
_KEY = "{}/.ATTRIBUTES/VARIABLE_VALUE"


def write_json_summary(log_dir: str, global_step: Any, eval_metrics: Mapping[str, Any]) -> None:
    """Writes metrics as text to `metrics-<global_step>.json`, all at once.

    Args:
      log_dir: folder of the file; made if it is missing.
      global_step: of the weights that were evaluated.
      eval_metrics: by name; a tensor is written as its value.

    Raises:
      StorageError: when the file cannot be written.
    """
    step = int(to_numpy(global_step))
    texts = {name: str(to_numpy(value)) for name, value in eval_metrics.items()}
    path = os.path.join(log_dir, f"metrics-{step}.json")
    write_text(path, json.dumps(texts, indent=4) + "\n")
    _LOG.info("evaluation of step %d, written to %s: %s", step, path, texts)


def write_summary(summary_writer: Any, global_step: Any, eval_metrics: Mapping[str, Any]) -> None:
    """Writes metrics for TensorBoard and flushes; eager, on the host.

    Args:
      summary_writer: of tf.summary.create_file_writer.
      global_step: of the weights that were evaluated.
      eval_metrics: by name, each a single number.

    Raises:
      UsageError: when one is no number; nothing is written then.
    """
    numbers = {name: _number(name, value) for name, value in eval_metrics.items()}
    with summary_writer.as_default():
        for name, number in numbers.items():
            tf.summary.scalar(name, number, step=global_step)
        summary_writer.flush()


def read_global_step_from_checkpoint(ckpt_file_path: str) -> int:
    """Returns the global step that a checkpoint holds.

    Args:
      ckpt_file_path: path of the checkpoint, without suffixes, or of a folder, whose newest one is read.

    Raises:
      UsageError: (a ValueError) when the checkpoint holds no global step.
      tf.errors.NotFoundError: when there is no such checkpoint.
    """
    path = ckpt_file_path
    if tf.io.gfile.isdir(path):
        path = tf.train.latest_checkpoint(path) or path
    reader = tf.train.load_checkpoint(path)
    key = _KEY.format("global_step")
    if not reader.has_tensor(key):
        names = [name.partition("/")[0] for name in reader.get_variable_to_shape_map()]
        advice = suggestion("global_step", sorted(set(names) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}))
        raise UsageError(
            f"global_step not found in checkpoint {path}: it holds no global_step; {advice} The step of weights "
            "that were saved without it is not known: save them in a tf.train.Checkpoint(global_step=..., ...)"
        )
    step = int(reader.get_tensor(key))
    _LOG.info("%s is of step %d", path, step)
    return step


def remove_ckpts(model_dir: str) -> None:
    """Removes the checkpoints in a folder, finished and unfinished, so that training starts from step 0.

    That is what a checkpoint manager writes for `ckpt-<step>`, of TensorFlow's or ours, and the file `checkpoint`.
    Others' files stay, whatever they are called. The pointer goes first, then each checkpoint's record and index: what
    a crash leaves cannot be taken for a whole checkpoint.

    A run of ours that has told of evaluations starts anew with `--from_step=0` only, which moves all that to a side.
    """
    if not tf.io.gfile.isdir(model_dir):
        return
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(model_dir)]
    ours = [name for name in names if owner(name) or name == "checkpoint" or UNFINISHED.fullmatch(name)]
    _LOG.info("removing %d files of checkpoints in %s", len(ours), model_dir)
    for name in sorted(ours, key=_order):
        path = os.path.join(model_dir, name)
        if tf.io.gfile.isdir(path):
            tf.io.gfile.rmtree(path)
        else:
            tf.io.gfile.remove(path)


def _order(name: str) -> tuple[int, str]:
    ends = ("checkpoint", RECORD, ".index")
    return next((place for place, end in enumerate(ends) if name.endswith(end)), len(ends)), name


def _number(name: str, value: Any) -> float:
    array = to_numpy(value)
    try:
        return float(np.asarray(array).item())
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metric {name!r} is {array!r}, not a single number; leave it out") from error
