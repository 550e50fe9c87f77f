"""Whoever wrote against official.core can call ours the same way: names, order, kinds and defaults
of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from official.common import distribute_utils
from official.core import actions as their_actions
from official.core import base_trainer, train_lib, train_utils
from official.modeling.multitask import base_trainer as their_multitask_trainer
from official.modeling.multitask import evaluator, interleaving_trainer
from official.modeling.multitask import train_lib as their_multitask_lib

from trainer_kit.compat import model_garden
from trainer_kit.compat.model_garden import actions, best_checkpoint, multitask
from trainer_kit.compat.model_garden import experiment_runner as runner
from trainer_kit.compat.model_garden import garden_trainer as trainer

MODULES = (base_trainer, train_lib, distribute_utils, their_actions, train_utils)
MULTITASK = [
    their_multitask_lib.run_experiment,
    their_multitask_lib.run_experiment_with_multitask_eval,
    their_multitask_lib.get_trainer,
    their_multitask_trainer.MultiTaskBaseTrainer,
    interleaving_trainer.MultiTaskInterleavingTrainer,
    evaluator.MultiTaskEvaluator,
]
# Of those of several tasks: taken as further keyword arguments of trainer_kit.run_experiment, or
# removed.
ELSEWHERE = {"eval_summary_manager", "save_summary", "best_ckpt_exporter_creator", "train_datasets"}
ELSEWHERE |= {"train_actions_factory", "eval_actions_factory"}
# Public names of those modules that only Model Garden's own code uses.
NOT_OFFERED = {"DummyContextManager", "get_runtime_options", "tpu_initialize"}
METHODS = {
    trainer.Trainer: (
        base_trainer.Trainer,
        [
            "strategy",
            "config",
            "task",
            "model",
            "optimizer",
            "global_step",
            "checkpoint",
            "checkpoint_exporter",
            "train_loss",
            "validation_loss",
            "train_metrics",
            "validation_metrics",
            "initialize",
            "join",
            "train_loop_end",
            "next_train_inputs",
            "train_step",
            "eval_begin",
            "next_eval_inputs",
            "eval_step",
            "eval_end",
            "eval_reduce",
            "distribute_dataset",
            "create_train_loop_fn",
            "create_eval_loop_fn",
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
            "maybe_export_checkpoint",
            "export_best_eval_metric",
            "best_ckpt_logs",
            "best_ckpt_logs_path",
            "best_ckpt_path",
        ],
    ),
    multitask.MultiTaskBaseTrainer: (
        their_multitask_trainer.MultiTaskBaseTrainer,
        [
            "train_loop_begin",
            "train_loop_end",
            "checkpoint",
            "training_losses",
            "training_metrics",
            "strategy",
            "multi_task",
            "multi_task_model",
            "optimizer",
            "global_step",
        ],
    ),
    multitask.MultiTaskInterleavingTrainer: (
        interleaving_trainer.MultiTaskInterleavingTrainer,
        ["task_step_counter", "train_loop_end"],
    ),
    multitask.MultiTaskEvaluator: (
        evaluator.MultiTaskEvaluator,
        [
            "strategy",
            "tasks",
            "model",
            "global_step",
            "validation_losses",
            "validation_metrics",
            "checkpoint",
            "evaluate",
        ],
    ),
}
OFFERED = [
    (module, name)
    for module in MODULES
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__
    and name[0] != "_"
    and name not in NOT_OFFERED
]
NAMED = [
    *((name, getattr(model_garden, name), getattr(theirs, name)) for theirs, name in OFFERED),
    *(
        (f"{theirs.__name__} of several", getattr(multitask, theirs.__name__), theirs)
        for theirs in MULTITASK
    ),
    *(
        (f"{ours.__name__}.{name}", getattr(ours, name), getattr(theirs, name))
        for ours, (theirs, names) in METHODS.items()
        for name in names
    ),
]


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Returns name, kind and default of each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (parameter.name, parameter.kind, getattr(parameter.default, "__name__", parameter.default))
        for parameter in parameters
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"), [pair for _, *pair in NAMED], ids=[name for name, *_ in NAMED]
)
def test_the_parameters_match_and_added_ones_are_optional(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    is_multitask = "multitask" in theirs.__module__
    expected = _parameters(theirs)
    if is_multitask:
        expected = [parameter for parameter in expected if parameter[0] not in ELSEWHERE]

    parameters = _parameters(ours)

    assert parameters[: len(expected)] == expected
    keyword_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    for _, kind, default in parameters[len(expected) :]:
        assert kind in keyword_kinds or (is_multitask and default != "_empty")


def test_a_name_of_several_tasks_is_imported_when_it_is_used() -> None:
    assert all(hasattr(multitask, name) for name in multitask.__all__)
    with pytest.raises(AttributeError, match="it has: MultiTask"):
        multitask.MultiTusk  # noqa: B018
