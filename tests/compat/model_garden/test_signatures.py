"""Whoever wrote against official.core can call ours the same way: names, order, kinds and defaults of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from official.common import distribute_utils
from official.common import flags as their_flags
from official.core import actions as their_actions
from official.core import train_utils

from trainer_kit.compat.model_garden import (
    actions,
    best,
    flags,
    gin_record,
    model_stats,
    nested,
    results,
    strategy,
)

FUNCTIONS = {
    train_utils: {
        nested: ["get_leaf_nested_dict", "cast_leaf_nested_dict"],
        results: ["write_json_summary", "write_summary", "remove_ckpts", "read_global_step_from_checkpoint"],
        model_stats: ["write_model_params", "try_count_params", "try_count_flops"],
        gin_record: ["save_gin_config"],
        best: ["BestCheckpointExporter", "maybe_create_best_ckpt_exporter"],
    },
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
    best.BestCheckpointExporter: (
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
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("ours", "theirs"), [one[1:] for one in NAMED], ids=[one[0] for one in NAMED])
def test_the_parameters_are_theirs_and_what_is_added_is_keyword_only(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    expected, found = _parameters(theirs), _parameters(ours)
    assert found[: len(expected)] == expected
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in found[len(expected) :])
