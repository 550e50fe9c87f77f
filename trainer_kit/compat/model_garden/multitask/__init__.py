"""The door for `official.modeling.multitask`: several tasks, trained or evaluated together.

Names and signatures are theirs. Their tasks, samplers, models and configs are used as they are. What is asked for is
imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_OURS = "trainer_kit.compat.model_garden.multitask"
_THEIRS = "official.modeling.multitask"
_HOME = {
    **dict.fromkeys(
        ("TRAINERS", "get_trainer", "run_experiment", "run_experiment_with_multitask_eval"), f"{_OURS}.train_lib"
    ),
    "MultiTaskBaseTrainer": f"{_OURS}.base_trainer",
    "MultiTaskInterleavingTrainer": f"{_OURS}.interleaving_trainer",
    "MultiTaskEvaluator": f"{_OURS}.evaluator",
    "MultiTask": f"{_THEIRS}.multitask",
    "MultiTaskBaseModel": f"{_THEIRS}.base_model",
    **dict.fromkeys(
        (
            *("TaskSampler", "UniformTaskSampler", "ProportionalTaskSampler", "AnnealingTaskSampler"),
            "get_task_sampler",
        ),
        f"{_THEIRS}.task_sampler",
    ),
    **dict.fromkeys(
        (
            *("TaskRoutine", "MultiTaskConfig", "MultiTaskTrainerConfig", "TaskSamplingConfig"),
            *("ProportionalSampleConfig", "AnnealingSampleConfig"),
            *("MultiTaskExperimentConfig", "MultiEvalExperimentConfig"),
        ),
        f"{_THEIRS}.configs",
    ),
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
