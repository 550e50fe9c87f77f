"""Reads and checks info.json, which names the best checkpoint. It imports no TensorFlow.

The file may also be in the form of TF Model Garden, which has only the metrics and the step. The
rest then comes from the commit record of the weights of that step.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any, TypedDict, TypeGuard

from trainer_kit import files
from trainer_kit.checkpoints.commit import read_commit_record
from trainer_kit.telemetry.scalars import flatten_scalars, from_json_number

INFO = "info.json"
# The key of the step in the form of TF Model Garden
GARDEN_STEP = "best_ckpt_global_step"
_LOG = logging.getLogger(__name__)


class BestInfo(TypedDict):
    """The content of info.json, and the info in the commit record of best weights.

    Attributes:
      checkpoint: The name of the checkpoint, `ckpt-<step>`.
      step: The global step of the weights.
      metric: The name of the metric that decides.
      value: The value of the metric.
      metrics: All metrics by name, nested names joined by `|`.
    """

    checkpoint: str
    step: int
    metric: str
    value: float
    metrics: dict[str, float]


def read_info(export_dir: str, quiet: bool = False) -> BestInfo | None:
    """Returns the content of info.json.

    Returns None if it does not exist or, with a warning, if it cannot be read.

    Args:
      export_dir: The folder of the best weights.
      quiet: Whether to omit the warning.
    """
    path = os.path.join(export_dir, INFO)
    content = files.read_json(path) or {}
    step = content.get(GARDEN_STEP)
    if isinstance(step, (int, float)) and math.isfinite(step):
        info = read_recorded_info(export_dir, int(step))
    else:
        info = content if is_info(content) else None
    if info is not None:
        return info

    if not quiet and os.path.exists(path):
        _LOG.warning("%s cannot be read: it is damaged, or trainer_kit has not written it", path)
    return None


def read_recorded_info(export_dir: str, step: int) -> BestInfo | None:
    """Returns the info in the commit record of the weights of `step`, or None."""
    prefix = os.path.join(export_dir, f"ckpt-{step}")
    record = read_commit_record(prefix) or {}
    info: Any = record.get("info")
    if not is_info(info):
        return None
    if info["step"] == step:
        return info
    return None


def build_info(step: int, metrics: Mapping[str, object], metric: str) -> BestInfo:
    """Returns the info of weights, for their record and for info.json.

    Args:
      step: The global step of the weights.
      metrics: The metrics, possibly nested.
      metric: The name of the metric that decides.
    """
    flat = flatten_scalars(metrics, "|")
    return {
        "checkpoint": f"ckpt-{step}",
        "step": step,
        "metric": metric,
        "value": flat[metric],
        "metrics": flat,
    }


def is_info(value: object) -> TypeGuard[BestInfo]:
    """Whether `value` has the content that trainer_kit writes to info.json."""
    if not isinstance(value, dict):
        return False
    kinds: dict[str, Any] = {"step": int, "value": (int, float), "metric": str, "metrics": dict}
    for key, kind in kinds.items():
        entry = value.get(key)
        if not isinstance(entry, kind):
            return False

    metrics = value["metrics"]
    for number in (value["step"], value["value"], *metrics.values()):
        # A bool is an int for Python.
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
    if value.get("checkpoint") != f"ckpt-{value['step']}":
        return False
    best_value = from_json_number(value["value"])
    return math.isfinite(best_value)
