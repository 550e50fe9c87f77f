"""The door for TF Model Garden: their tasks, experiments, YAML and gin files on our engine.

Names of `official.core` with the signatures that they have there, resolved when first used: importing this imports
nothing of theirs. Tasks, configs and models are written with theirs and registered with theirs.
"""

from __future__ import annotations

import importlib
from typing import Any

_OURS = {
    "actions.actions": (
        "EMACheckpointing", "PruningAction", "RecoveryAction", "RecoveryCondition", "get_eval_actions",
        "get_train_actions",
    ),
    "actions.best_checkpoint": ("BestCheckpointExporter", "maybe_create_best_ckpt_exporter"),
    "config.flags": ("define_flags",),
    "files.gin_record": ("save_gin_config",),
    "training.model_stats": ("try_count_flops", "try_count_params", "write_model_params"),
    "training.nested_logs": ("cast_leaf_nested_dict", "get_leaf_nested_dict"),
    "training.optimizers": ("create_optimizer",),
    "config.parsing": ("ExperimentParser", "ParseConfigOptions", "parse_configuration", "serialize_config"),
    "files.results": ("read_global_step_from_checkpoint", "remove_ckpts", "write_json_summary", "write_summary"),
    "training.runner": ("OrbitExperimentRunner", "run_experiment"),
    "training.strategy": ("configure_cluster", "get_distribution_strategy", "get_strategy_scope"),
    "training.trainer": ("Trainer", "_AsyncTrainer", "create_trainer"),
}  # fmt: skip
_THEIRS = {
    "official.core.exp_factory": ("get_exp_config", "register_config_factory"),
    "official.core.task_factory": ("get_task", "get_task_cls", "register_task_cls"),
}
_HOME = {
    **{name: f"{__name__}.{module}" for module, names in _OURS.items() for name in names},
    **{name: module for module, names in _THEIRS.items() for name in names},
}

__all__ = [name for name in _HOME if not name.startswith("_")]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
