"""Compatibility layer for `official.modeling.multitask`: several tasks, trained or evaluated together.

Names and signatures are Model Garden's, and its tasks, samplers, models and configs are used unchanged. Each name is
imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_DOOR = "trainer_kit.compat.model_garden.multitask"
_MODEL_GARDENS = "official.modeling.multitask"
_HOME = {
    **dict.fromkeys(
        ("TRAINERS", "get_trainer", "run_experiment", "run_experiment_with_multitask_eval"), f"{_DOOR}.train_lib"
    ),
    "MultiTaskBaseTrainer": f"{_DOOR}.base_trainer",
    "MultiTaskInterleavingTrainer": f"{_DOOR}.interleaving_trainer",
    "MultiTaskEvaluator": f"{_DOOR}.evaluator",
    "MultiTask": f"{_MODEL_GARDENS}.multitask",
    "MultiTaskBaseModel": f"{_MODEL_GARDENS}.base_model",
    **dict.fromkeys(
        (
            *("TaskSampler", "UniformTaskSampler", "ProportionalTaskSampler", "AnnealingTaskSampler"),
            "get_task_sampler",
        ),
        f"{_MODEL_GARDENS}.task_sampler",
    ),
    **dict.fromkeys(
        (
            *("TaskRoutine", "MultiTaskConfig", "MultiTaskTrainerConfig", "TaskSamplingConfig"),
            *("ProportionalSampleConfig", "AnnealingSampleConfig"),
            *("MultiTaskExperimentConfig", "MultiEvalExperimentConfig"),
        ),
        f"{_MODEL_GARDENS}.configs",
    ),
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
