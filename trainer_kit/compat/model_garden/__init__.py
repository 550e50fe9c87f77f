"""Compatibility layer for TF Model Garden.

Its tasks, experiments, YAML and gin files run on trainer_kit's engine. The names and signatures are
those of `official.core`. Each name is imported when it is first used, so importing this module
imports nothing of Model Garden. Names that need no translation are Model Garden's own objects.
"""

from __future__ import annotations

import importlib
from typing import Any

from trainer_kit.errors import UsageError, get_install_command

_TRANSLATED = {
    "actions": ("RecoveryAction", "RecoveryCondition", "get_eval_actions", "get_train_actions"),
    "best_checkpoint": ("BestCheckpointExporter", "maybe_create_best_ckpt_exporter"),
    "parsing": ("parse_configuration", "serialize_config"),
    "optimizers": ("create_optimizer",),
    "experiment_runner": ("OrbitExperimentRunner", "run_experiment"),
    "distribution_strategy": ("get_distribution_strategy",),
    "garden_trainer": ("Trainer", "_AsyncTrainer", "create_trainer"),
}
_REEXPORTED_NAMES = {
    "official.common.distribute_utils": ("configure_cluster", "get_strategy_scope"),
    "official.common.flags": ("define_flags",),
    "official.core.actions": ("EMACheckpointing", "PruningAction"),
    "official.core.exp_factory": ("get_exp_config", "register_config_factory"),
    "official.core.task_factory": ("get_task", "get_task_cls", "register_task_cls"),
    "official.core.train_utils": (
        "ExperimentParser",
        "ParseConfigOptions",
        "cast_leaf_nested_dict",
        "get_leaf_nested_dict",
        "read_global_step_from_checkpoint",
        "remove_ckpts",
        "save_gin_config",
        "try_count_flops",
        "try_count_params",
        "write_json_summary",
        "write_model_params",
        "write_summary",
    ),
}
_HOME = {
    **{name: f"{__name__}.{module}" for module, names in _TRANSLATED.items() for name in names},
    **{name: module for module, names in _REEXPORTED_NAMES.items() for name in names},
}

__all__ = [name for name in _HOME if not name.startswith("_")]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(sorted(_HOME))}"
        )
    try:
        module = importlib.import_module(_HOME[name])
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("official", "orbit", "tf_keras"):
            raise
        raise UsageError(
            f"{name} needs TF Model Garden, which cannot be imported ({error}):"
            f" {get_install_command('model-garden')}"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
