"""Experiments by name, and tasks by the class of their config."""

from __future__ import annotations

import abc
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.config.experiment_registry import (
    find_trainer_class,
    get_experiment,
    lookup_task_class,
    register_experiment,
    register_task,
)
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig, TrainerConfig
from trainer_kit.errors import UsageError


@configclass
class KnownTaskConfig(TaskConfig):
    size: int = 1


@configclass
class ChildTaskConfig(KnownTaskConfig):
    more: int = 2


class PlainTaskConfig(TaskConfig):
    """Not decorated: a mistake that users make."""

    size: int = 1


def test_a_factory_makes_a_new_config_at_each_call(name: str) -> None:
    @register_experiment(name)
    def factory(steps: int = 5) -> ExperimentConfig:
        return ExperimentConfig(trainer=TrainerConfig(train_steps=steps))

    first = get_experiment(name)
    second = get_experiment(name)

    assert first == second
    assert first is not second
    assert first.replace(trainer={"train_steps": 7}) != get_experiment(name)
    assert get_experiment(name, steps=6).trainer.train_steps == 6
    assert factory(8).trainer.train_steps == 8


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (dict, "has to return an ExperimentConfig"),
        (
            lambda: ExperimentConfig(task=PlainTaskConfig()),
            "section task is a PlainTaskConfig.*configclass",
        ),
    ],
)
def test_a_factory_has_to_return_a_config_of_decorated_sections(
    factory: Callable[[], Any], said: str, name: str
) -> None:
    register_experiment(name)(factory)
    with pytest.raises(UsageError, match=said):
        get_experiment(name)


def test_a_task_belongs_to_exactly_its_config_class() -> None:
    @register_task(KnownTaskConfig)
    class KnownTask: ...

    assert lookup_task_class(KnownTaskConfig(size=3)) is KnownTask

    with pytest.raises(
        UsageError, match=r"no task is registered for ChildTaskConfig.*register_task"
    ):
        lookup_task_class(ChildTaskConfig())

    assert register_task(KnownTaskConfig)(KnownTask) is KnownTask

    with pytest.raises(UsageError, match="bound to the task"):
        register_task(KnownTaskConfig)(type("Other", (), {}))


def test_a_task_of_a_notebook_may_be_defined_again() -> None:
    @configclass
    class CellConfig(TaskConfig): ...

    for _ in range(2):
        task = type("CellTask", (), {"__module__": "__main__"})
        register_task(CellConfig)(task)
        assert lookup_task_class(CellConfig()) is task


def test_only_a_decorated_config_class_can_have_a_task() -> None:
    with pytest.raises(UsageError, match="PlainTaskConfig has to be decorated"):
        register_task(PlainTaskConfig)


def test_a_task_that_is_named_is_imported_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @configclass
    class LateConfig(TaskConfig):
        pass

    @configclass
    class MisspeltConfig(TaskConfig):
        pass

    (tmp_path / "late_task_module.py").write_text("class LateTask: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_task(LateConfig, "late_task_module:LateTask")
    register_task(MisspeltConfig, "late_task_module:LatTask")

    assert "late_task_module" not in sys.modules
    assert lookup_task_class(LateConfig()) is sys.modules["late_task_module"].LateTask

    with pytest.raises(
        UsageError, match="late_task_module has no class called 'LatTask'; did you mean LateTask"
    ):
        lookup_task_class(MisspeltConfig())


def test_a_task_without_a_method_that_it_needs_is_told() -> None:
    @configclass
    class HalfConfig(TaskConfig):
        pass

    class Needs(abc.ABC):
        @abc.abstractmethod
        def build_model(self) -> None: ...

        @abc.abstractmethod
        def build_inputs(self) -> None: ...

    @register_task(HalfConfig)
    class HalfTask(Needs): ...

    with pytest.raises(
        UsageError,
        match=r"HalfTask lacks build_inputs and build_model; every task has to define them",
    ):
        lookup_task_class(HalfConfig())


def test_a_trainer_class_may_be_bound_beside_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @configclass
    class OwnTrainerConfig(TaskConfig):
        pass

    @configclass
    class NamedTrainerConfig(TaskConfig):
        pass

    class OwnTrainer: ...

    class OwnTask: ...

    register_task(OwnTrainerConfig, trainer=OwnTrainer)(OwnTask)
    (tmp_path / "late_trainer_module.py").write_text("class LateTrainer: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_task(
        NamedTrainerConfig, "late_task_module:LateTask", trainer="late_trainer_module:LateTrainer"
    )

    assert lookup_task_class(OwnTrainerConfig()) is OwnTask
    assert find_trainer_class(OwnTrainerConfig()) is OwnTrainer
    assert (
        find_trainer_class(NamedTrainerConfig()) is sys.modules["late_trainer_module"].LateTrainer
    )
    assert find_trainer_class(KnownTaskConfig()) is None  # the engine's own


def test_an_unused_config_class_is_freed() -> None:
    def make() -> weakref.ref[type]:
        @configclass
        class PassingConfig(TaskConfig):
            pass

        register_task(PassingConfig, "some.module:Task", trainer="some.module:Trainer")
        return weakref.ref(PassingConfig)

    reference = make()
    gc.collect()

    assert reference() is None
