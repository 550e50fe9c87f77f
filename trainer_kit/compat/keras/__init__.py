"""Compatibility layer for Keras: compiled models and loops by hand run on trainer_kit's engine.

The names are imported when they are first used, so that importing this module imports neither
TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "fit": "model_fit",
    "evaluate": "inference",
    "load": "inference",
    "predict": "inference",
    "KerasTask": "keras_task",
    "register_keras_experiment": "keras_experiments",
    "train_loop": "hand_written_loop",
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
