"""Whoever wrote against official.core can call ours the same way: names, order, kinds and defaults of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from official.common import distribute_utils
from official.core import actions as their_actions
from official.core import base_trainer, train_lib, train_utils

from trainer_kit.compat import model_garden
from trainer_kit.compat.model_garden import actions, best_checkpoint, parsing, runner, trainer

MODULES = (base_trainer, train_lib, distribute_utils, their_actions, train_utils)
# Public names of those modules that only Model Garden's own code uses.
NOT_OFFERED = {"DummyContextManager", "get_runtime_options", "tpu_initialize"}
METHODS = {
    parsing.ExperimentParser: (
        train_utils.ExperimentParser,
        [
            *("parse", "base_experiment", "parse_config_file", "parse_runtime", "parse_data_service"),
            "parse_params_override",
        ],
    ),
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
    actions.RecoveryCondition: (their_actions.RecoveryCondition, ["__call__"]),
    actions.RecoveryAction: (their_actions.RecoveryAction, ["__call__"]),
    best_checkpoint.BestCheckpointExporter: (
        train_utils.BestCheckpointExporter,
        [
            *("maybe_export_checkpoint", "export_best_eval_metric"),
            *("best_ckpt_logs", "best_ckpt_logs_path", "best_ckpt_path"),
        ],
    ),
}
OFFERED = [
    (module, name)
    for module in MODULES
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__ and name[0] != "_" and name not in NOT_OFFERED
]
NAMED = [
    (f"{theirs.__name__.rpartition('.')[2]}.{name}", getattr(model_garden, name), getattr(theirs, name))
    for theirs, name in OFFERED
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
def test_the_parameters_match_and_added_ones_are_keyword_only(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    expected, found = _parameters(theirs), _parameters(ours)
    assert found[: len(expected)] == expected
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(kind in by_name for _, kind, _ in found[len(expected) :])
