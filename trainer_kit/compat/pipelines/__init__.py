"""Compatibility layer for the pipelines class Training, on the engine of trainer_kit.

Components of a pipeline run on this engine. The names are imported when they are first used, so
that importing this module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BCTModel": "bct",
    "KFPVisualization": "kfp",
    "RetrievalAccuracy": "bct",
    "TFRECORD_FEATURES": "tfrecord_datasets",
    "Training": "training",
    "exit_codes": "job_exits",
    "get_labels": "tfrecord_datasets",
    "get_tfrecord_dataset": "tfrecord_datasets",
    "get_train_ds": "tfrecord_datasets",
    "get_valid_ds": "tfrecord_datasets",
    "preprocess_image": "tfrecord_datasets",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
