"""Whoever wrote against official.modeling.multitask can call ours the same way."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from official.modeling.multitask import base_trainer, configs, evaluator, interleaving_trainer, multitask, train_lib

from trainer_kit.compat.model_garden import multitask as ours

THEIRS: dict[str, tuple[Any, list[str]]] = {
    "run_experiment": (train_lib.run_experiment, []),
    "run_experiment_with_multitask_eval": (train_lib.run_experiment_with_multitask_eval, []),
    "get_trainer": (train_lib.get_trainer, []),
    "MultiTaskBaseTrainer": (
        base_trainer.MultiTaskBaseTrainer,
        [
            *("train_loop_begin", "train_loop_end", "checkpoint", "training_losses", "training_metrics", "strategy"),
            *("multi_task", "multi_task_model", "optimizer", "global_step"),
        ],
    ),
    "MultiTaskInterleavingTrainer": (
        interleaving_trainer.MultiTaskInterleavingTrainer,
        ["task_step_counter", "train_loop_end"],
    ),
    "MultiTaskEvaluator": (
        evaluator.MultiTaskEvaluator,
        [
            *("strategy", "tasks", "model", "global_step", "validation_losses", "validation_metrics", "checkpoint"),
            "evaluate",
        ],
    ),
}
OPTIONS = {"eval_summary_manager", "save_summary"}  # taken as further keyword arguments of trainer_kit.run_experiment
REMOVED = {"best_ckpt_exporter_creator", "train_actions_factory", "eval_actions_factory", "train_datasets"}
MEMBERS = [(getattr(ours, name), theirs, member) for name, (theirs, members) in THEIRS.items() for member in members]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def check(function: Any, theirs: Any) -> None:
    """Asserts that all of theirs but OPTIONS and REMOVED are there, and that others go by name."""
    expected, found = [one for one in parameters(theirs) if one[0] not in OPTIONS | REMOVED], parameters(function)
    assert found[: len(expected)] == expected
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(kind in named or default is not inspect.Parameter.empty for _, kind, default in found[len(expected) :])


@pytest.mark.parametrize("name", THEIRS)
def test_the_parameters_are_theirs(name: str) -> None:
    check(getattr(ours, name), THEIRS[name][0])


@pytest.mark.parametrize(("cls", "theirs", "name"), MEMBERS, ids=[f"{one[1].__name__}.{one[2]}" for one in MEMBERS])
def test_so_are_the_methods(cls: Any, theirs: Any, name: str) -> None:
    if isinstance(getattr(theirs, name), property):
        assert isinstance(getattr(cls, name), property)
    else:
        check(getattr(cls, name), getattr(theirs, name))


def test_what_is_used_as_it_is_comes_from_theirs() -> None:
    assert ours.MultiTask is multitask.MultiTask
    assert ours.MultiTaskExperimentConfig is configs.MultiTaskExperimentConfig
    assert {name for name in ours.__all__ if not hasattr(ours, name)} == set()
    with pytest.raises(AttributeError, match="MultiTask"):
        ours.MultiTusk  # noqa: B018
