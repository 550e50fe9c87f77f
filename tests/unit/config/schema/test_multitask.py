"""MultiTaskConfig: tasks by name, what it refuses, and what evaluations and resumes depend on."""

from __future__ import annotations

from typing import Any

import pytest

import trainer_kit as tk
from tests.config_builders import apply_values, collect_mistakes, nest_value, wrong_fields
from trainer_kit.config.resume_check import get_change_kind
from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.serialize import to_yaml
from trainer_kit.process.run_directory import compute_config_hash


@tk.configclass
class PointsConfig(tk.TaskConfig):
    """A task with a field of its own."""

    width: int = 4


def _build_experiment(**task: Any) -> tk.ExperimentConfig:
    routines = {name: tk.TaskRoutine(task_config=PointsConfig()) for name in ("near", "far")}
    return tk.ExperimentConfig(task=tk.MultiTaskConfig(task_routines=routines).replace(**task))


def test_another_layer_changes_one_field_of_one_task() -> None:
    far = {"task_config": {"width": 8}, "task_weight": 3.0}
    changed = apply_values(
        _build_experiment(), nest_value("task.task_routines.far", far)
    ).config.task

    assert [routine.task_config.width for routine in changed.task_routines.values()] == [4, 8]
    assert [routine.task_weight for routine in changed.task_routines.values()] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("path", "near"),
    [("far.task_config.widht", "width"), ("fra", "(all: far, near), and"), ("fra", "mean far?")],
)
def test_a_misspelt_task_or_field_gets_near_names(path: str, near: str) -> None:
    path = f"task.task_routines.{path}"
    assert near in str(
        collect_mistakes(apply_values, _build_experiment(), nest_value(path, {"task_weight": 2.0}))[
            path
        ]
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"task_routines": {}}, "task_routines"),
        ({"task_routines": {"a.b": {"task_config": {}}}}, "task_routines"),
        ({"task_routines": {"a": {"task_config": {}, "task_weight": 0.0}}}, "task_routines"),
        (
            {"task_routines": {"a": {"task_config": {"validation_data": {"x": {}, "y": {}}}}}},
            "task_routines.a.task_config.validation_data",
        ),
        (
            {"task_routines": {"a": {"task_config": {}}}, "evaluated_tasks": ("b",)},
            "evaluated_tasks",
        ),
    ],
)
def test_tasks_that_cannot_be_trained_are_refused(values: dict[str, Any], field: str) -> None:
    assert field in wrong_fields(tk.MultiTaskConfig, values)


METRIC = {"type": "keras", "tensor": "features", "keras": {"metric": "Mean"}}
ODD_BATCH = {"near": {"task_config": {"train_data": {"global_batch_size": 7}}}}


@pytest.mark.parametrize(
    ("task", "values", "path"),
    [
        ({}, {"trainer": {"accumulate_steps": 2}}, "trainer.accumulate_steps"),
        ({}, {"trainer": {"metrics": [METRIC]}}, "trainer.metrics"),
        ({}, {"trainer": {"summaries": [{"tensor": "features"}]}}, "trainer.summaries"),
        ({}, {"task": {"train_data": {"global_batch_size": 8}}}, "task.train_data"),
        (
            {"task_routines": ODD_BATCH},
            {"runtime": {"virtual_cpus": 2}},
            "task.task_routines.near.task_config.train_data.global_batch_size",
        ),
    ],
)
def test_what_several_tasks_cannot_have_is_refused(
    task: dict[str, Any], values: dict[str, Any], path: str
) -> None:
    assert collect_mistakes(_build_experiment(**task).replace, **values).keys() == {path}


def test_joint_steps_may_have_summaries_of_tensors() -> None:
    config = _build_experiment(training="joint").replace(
        trainer={"summaries": [{"tensor": "features"}]}
    )
    assert config.trainer.summaries[0].tensor == "features"


def test_each_task_is_a_validation_set_unless_left_out() -> None:
    assert [*get_validation_sets(_build_experiment().task)] == ["near", "far"]
    assert [*get_validation_sets(_build_experiment(evaluated_tasks=("far",)).task)] == ["far"]


def test_an_evaluation_depends_on_its_own_task_only() -> None:
    plain = _build_experiment()
    far = _build_experiment(task_routines={"far": {"task_config": {"width": 8}}})
    longer = _build_experiment(sampling_seed=5, task_routines={"near": {"task_weight": 2.0}})

    assert (
        compute_config_hash(plain, "near")
        == compute_config_hash(far, "near")
        == compute_config_hash(longer, "near")
    )
    assert (
        compute_config_hash(plain, "far")
        != compute_config_hash(far, "far")
        != compute_config_hash(far)
    )
    assert compute_config_hash(plain) == compute_config_hash(longer)


def test_a_resume_may_change_what_it_may_change_of_one_task() -> None:
    paths = {
        "task_routines.a.task_config.validation_data.global_batch_size": "safe",
        "evaluated_tasks": "safe",
    }
    paths |= {
        "task_routines.a.task_config.train_data.seed": "dangerous",
        "task_routines.a.task_weight": "dangerous",
    }

    assert {path: get_change_kind(f"task.{path}") for path in paths} == paths


def test_data_outside_of_the_tasks_is_written_as_none() -> None:
    assert "train_data: null" in to_yaml(_build_experiment())
