"""Whoever wrote against official.core can call ours the same way: names, order, kinds and defaults of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from official.common import distribute_utils
from official.common import flags as their_flags
from official.core import actions as their_actions
from official.core import base_trainer, train_lib, train_utils

from trainer_kit.compat.model_garden.actions import actions, best_checkpoint
from trainer_kit.compat.model_garden.config import flags, parsing
from trainer_kit.compat.model_garden.files import gin_record, results
from trainer_kit.compat.model_garden.training import model_stats, nested_logs, optimizers, runner, strategy, trainer

FUNCTIONS = {
    train_utils: {
        nested_logs: ["get_leaf_nested_dict", "cast_leaf_nested_dict"],
        results: ["write_json_summary", "write_summary", "remove_ckpts", "read_global_step_from_checkpoint"],
        model_stats: ["write_model_params", "try_count_params", "try_count_flops"],
        gin_record: ["save_gin_config"],
        best_checkpoint: ["BestCheckpointExporter", "maybe_create_best_ckpt_exporter"],
        optimizers: ["create_optimizer"],
        parsing: ["ExperimentParser", "ParseConfigOptions", "parse_configuration", "serialize_config"],
        trainer: ["create_trainer"],
    },
    base_trainer: {trainer: ["Trainer"]},
    train_lib: {runner: ["OrbitExperimentRunner", "run_experiment"]},
    distribute_utils: {strategy: ["get_distribution_strategy", "configure_cluster", "get_strategy_scope"]},
    their_flags: {flags: ["define_flags"]},
    their_actions: {
        actions: [
            *("PruningAction", "EMACheckpointing", "RecoveryAction", "RecoveryCondition"),
            *("get_train_actions", "get_eval_actions"),
        ]
    },
}
METHODS = {
    parsing.ExperimentParser: (
        train_utils.ExperimentParser,
        [
            *("parse", "base_experiment", "parse_config_file", "parse_runtime", "parse_data_service"),
            "parse_params_override",
        ],
    ),
    parsing.ParseConfigOptions: (train_utils.ParseConfigOptions, ["__contains__"]),
    trainer.Trainer: (
        base_trainer.Trainer,
        [
            *("strategy", "config", "task", "model", "optimizer", "global_step", "checkpoint", "checkpoint_exporter"),
            *("train_loss", "validation_loss", "train_metrics", "validation_metrics", "initialize", "join"),
            *("train_loop_end", "next_train_inputs", "train_step", "eval_begin", "next_eval_inputs", "eval_step"),
            *("eval_end", "eval_reduce", "distribute_dataset", "create_train_loop_fn", "create_eval_loop_fn"),
        ],
    ),
    runner.OrbitExperimentRunner: (
        train_lib.OrbitExperimentRunner,
        ["params", "model_dir", "trainer", "checkpoint_manager", "controller", "run"],
    ),
    best_checkpoint.BestCheckpointExporter: (
        train_utils.BestCheckpointExporter,
        [
            *("maybe_export_checkpoint", "export_best_eval_metric"),
            *("best_ckpt_logs", "best_ckpt_logs_path", "best_ckpt_path"),
        ],
    ),
    actions.PruningAction: (their_actions.PruningAction, ["__call__"]),
    actions.EMACheckpointing: (their_actions.EMACheckpointing, ["__call__"]),
    actions.RecoveryCondition: (their_actions.RecoveryCondition, ["__call__"]),
    actions.RecoveryAction: (their_actions.RecoveryAction, ["__call__"]),
}
NAMED = [
    (f"{ours.__name__.rpartition('.')[2]}.{name}", getattr(ours, name), getattr(theirs, name))
    for theirs, modules in FUNCTIONS.items()
    for ours, names in modules.items()
    for name in names
] + [
    (f"{ours.__name__}.{name}", getattr(ours, name), getattr(theirs, name))
    for ours, (theirs, names) in METHODS.items()
    for name in names
]


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, _told(one.default)) for one in inspect.signature(function).parameters.values()]


def _told(default: Any) -> Any:
    return default.__name__ if inspect.isclass(default) and default is not inspect.Parameter.empty else default


@pytest.mark.parametrize(("ours", "theirs"), [one[1:] for one in NAMED], ids=[one[0] for one in NAMED])
def test_the_parameters_are_theirs_and_what_is_added_is_keyword_only(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    expected, found = _parameters(theirs), _parameters(ours)
    assert found[: len(expected)] == expected
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(kind in by_name for _, kind, _ in found[len(expected) :])
