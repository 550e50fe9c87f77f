"""MultiTaskConfig: tasks by name, what it refuses, and which of its values an evaluation or a resume depends on."""

from __future__ import annotations

from typing import Any

import pytest

import trainer_kit as tk
from tests.config_builders import wrong_fields
from trainer_kit.config.merge import apply
from trainer_kit.config.resume_check import kind_of
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.config.serialize import to_yaml
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import ConfigError
from trainer_kit.process.run_directory import config_hash


@tk.configclass
class PointsConfig(tk.TaskConfig):
    """A task with a field of its own."""

    width: int = 4


def _experiment(**task: Any) -> tk.ExperimentConfig:
    routines = {name: tk.TaskRoutine(task_config=PointsConfig()) for name in ("near", "far")}
    return tk.ExperimentConfig(task=tk.MultiTaskConfig(task_routines=routines).replace(**task))


def test_another_layer_changes_one_field_of_one_task() -> None:
    values = {"task": {"task_routines": {"far": {"task_config": {"width": 8}, "task_weight": 3.0}}}}
    changed = apply(_experiment(), [Layer(values, {})]).config.task
    assert [one.task_config.width for one in changed.task_routines.values()] == [4, 8]
    assert [one.task_weight for one in changed.task_routines.values()] == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"task\.task_routines\.far\.task_config\.widht.*width"):
        apply(_experiment(), [Layer({"task": {"task_routines": {"far": {"task_config": {"widht": 8}}}}}, {})])


def test_a_misspelt_task_gets_near_names() -> None:
    values = {"task": {"task_routines": {"fra": {"task_weight": 2.0}}}}
    message = r"^task\.task_routines\.fra: there is none of this name \(all: far, near\), and .* did you mean far\?$"
    with pytest.raises(ConfigError, match=message):
        apply(_experiment(), [Layer(values, {})])


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
        ({"task_routines": {"a": {"task_config": {}}}, "evaluated_tasks": ("b",)}, "evaluated_tasks"),
    ],
)
def test_tasks_that_cannot_be_trained_are_refused(values: dict[str, Any], field: str) -> None:
    assert field in wrong_fields(tk.MultiTaskConfig, values)


def test_batches_of_several_tasks_are_not_split() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.accumulate_steps: is for the step of one task"):
        _experiment().replace(trainer={"accumulate_steps": 2})


def test_tensors_of_steps_are_refused_where_none_is_reported() -> None:
    metric = {"type": "keras", "tensor": "features", "keras": {"metric": "Mean"}}
    with pytest.raises(ConfigError, match=r"trainer\.metrics: is for tensors of the step of one task"):
        _experiment().replace(trainer={"metrics": [metric]})
    summaries = {"trainer": {"summaries": [{"tensor": "features"}]}}
    with pytest.raises(ConfigError, match=r"trainer\.summaries: is for tensors of the step"):
        _experiment().replace(**summaries)
    _experiment(training="joint").replace(**summaries)


def test_each_task_is_a_validation_set_unless_left_out() -> None:
    assert [*validation_sets(_experiment().task)] == ["near", "far"]
    assert [*validation_sets(_experiment(evaluated_tasks=("far",)).task)] == ["far"]


def test_virtual_replicas_have_to_share_the_batches_of_a_task() -> None:
    odd = {"near": {"task_config": {"train_data": {"global_batch_size": 7}}}}
    with pytest.raises(ConfigError, match=r"task\.task_routines\.near\.task_config\.train_data\.global_batch_size"):
        _experiment(task_routines=odd).replace(runtime={"virtual_cpus": 2})


def test_an_evaluation_depends_on_its_own_task_only() -> None:
    plain = _experiment()
    far = _experiment(task_routines={"far": {"task_config": {"width": 8}}})
    longer = _experiment(sampling_seed=5, task_routines={"near": {"task_weight": 2.0}})
    assert config_hash(plain, "near") == config_hash(far, "near") == config_hash(longer, "near")
    assert config_hash(plain, "far") != config_hash(far, "far") != config_hash(far)
    assert config_hash(plain) == config_hash(longer)


def test_a_resume_may_change_what_it_may_change_of_one_task() -> None:
    paths = {"task_routines.a.task_config.validation_data.global_batch_size": "safe", "evaluated_tasks": "safe"}
    paths |= {"task_routines.a.task_config.train_data.seed": "dangerous", "task_routines.a.task_weight": "dangerous"}
    assert {path: kind_of(f"task.{path}") for path in paths} == paths


def test_data_outside_of_the_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_data"):
        _experiment(train_data={"global_batch_size": 8})
    assert "train_data: null" in to_yaml(_experiment())
