"""Compatibility layer for `official.modeling.multitask`: several tasks, trained or evaluated together.

Names and signatures are Model Garden's, and its tasks, samplers, models and configs are used unchanged. Each name is
imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "TRAINERS": "train_lib",
    "get_trainer": "train_lib",
    "run_experiment": "train_lib",
    "run_experiment_with_multitask_eval": "train_lib",
    "MultiTaskBaseTrainer": "trainers",
    "MultiTaskInterleavingTrainer": "trainers",
    "MultiTaskEvaluator": "trainers",
}
_MODEL_GARDENS = ("multitask", "base_model", "task_sampler", "configs")  # modules whose names are used as they are

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    for module in _MODEL_GARDENS:
        theirs = importlib.import_module(f"official.modeling.multitask.{module}")
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; of its own it has: {', '.join(__all__)}")
