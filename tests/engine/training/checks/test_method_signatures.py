"""Methods of a task that do not take what they are called with."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.errors import TrainerKitError
from trainer_kit.testing import TinyConfig, TinyTask
from trainer_kit.training.checks.model_and_config import check_methods


def _check(train: bool = True, evaluate: bool = True, **methods: Any) -> None:
    check_methods(type("Mine", (TinyTask,), methods)(TinyConfig()), train, evaluate)


def _other_names(self: Any, l: Any, o: Any) -> Any:  # noqa: E741
    return o


def test_other_names_are_told_with_file_line_and_the_right_ones() -> None:
    line = _other_names.__code__.co_firstlineno

    with pytest.raises(
        TrainerKitError, match=rf"{__file__}:{line}: Mine.build_losses\(l, o\) .*aux_losses=None\)"
    ):
        _check(build_losses=_other_names)


def test_what_only_own_steps_call_may_have_any_names() -> None:
    steps = {
        name: lambda self, inputs, model, **others: {} for name in ("train_step", "validation_step")
    }
    _check(build_losses=_other_names, **steps)


def test_arguments_in_one_mapping_are_fine() -> None:
    _check(
        build_losses=lambda self, **arguments: arguments["labels"],
        build_metrics=lambda self, *_, **__: [],
    )


def test_a_step_that_is_not_called_is_not_looked_at() -> None:
    _check(train=False, train_step=lambda self: {})
    with pytest.raises(TrainerKitError, match=r"Mine\.train_step"):
        _check(train_step=lambda self: {})


def test_tasks_of_others_are_left_alone() -> None:
    check_methods(object(), True, True)
