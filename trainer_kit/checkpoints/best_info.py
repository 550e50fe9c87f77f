"""info.json, which names the best checkpoint: what it has to be, and reading it. No TensorFlow."""

from __future__ import annotations

import json
import logging
import math
import os
from typing import Any

INFO = "info.json"
_LOG = logging.getLogger(__name__)


def read_info(export_dir: str, quiet: bool = False) -> dict[str, Any] | None:
    """Returns what info.json tells of the best checkpoint; None if there is none or it cannot be read (a warning)."""
    path = os.path.join(export_dir, INFO)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            info = json.load(stream)
    except (OSError, ValueError) as error:
        info, reason = None, str(error)
    else:
        reason = "it is not what trainer_kit writes"
    if is_info(info):
        return dict(info)
    if not quiet:
        _LOG.warning("%s cannot be read: %s", path, reason)
    return None


def is_info(value: Any) -> bool:
    """Whether `value` is what trainer_kit writes to info.json."""
    kinds: dict[str, Any] = {"step": int, "value": (int, float), "metric": str, "metrics": dict}
    if not isinstance(value, dict) or not all(isinstance(value.get(key), kind) for key, kind in kinds.items()):
        return False
    numbers = (value["step"], value["value"], *value["metrics"].values())
    if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        return False
    return value.get("checkpoint") == f"ckpt-{value['step']}" and math.isfinite(value["value"])
