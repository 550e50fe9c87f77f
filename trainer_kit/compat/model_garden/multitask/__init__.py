"""Compatibility layer for `official.modeling.multitask`.

Several tasks are trained or evaluated together. Names and signatures are Model Garden's, whose
tasks, samplers, models and configs are used unchanged. Each name is imported when it is first used.
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

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
