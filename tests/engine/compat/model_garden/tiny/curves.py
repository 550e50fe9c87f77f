"""Reads the curves of a run back from the event files of its model directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf


def read_curves(model_dir: Path) -> dict[str, dict[int, dict[str, float]]]:
    """What `train` and `validation` say by step; a task's values have its name before them, as in
    "foo/loss".
    """
    return {part: _read_folder(model_dir / part) for part in ("train", "validation")}


def _read_folder(folder: Path) -> dict[int, dict[str, float]]:
    curves: dict[int, dict[str, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        prefix = path.parent.relative_to(folder).as_posix()
        for step, name, value in _scalars(path):
            curves.setdefault(step, {})[name if prefix == "." else f"{prefix}/{name}"] = value
    return curves


def _scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            if _is_scalar(value):
                yield int(event.step), value.tag, float(tf.make_ndarray(value.tensor))


def _is_scalar(value: Any) -> bool:
    """Images are left out, and the speed, which is never the same."""
    return value.metadata.plugin_data.plugin_name == "scalars" and value.tag != "steps_per_second"
