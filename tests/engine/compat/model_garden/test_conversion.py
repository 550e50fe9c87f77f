"""Model Garden's ExperimentConfig becomes ours: what is kept, what means something else, what is
refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from official.core import config_definitions, exp_factory, task_factory
from official.modeling.hyperparams import Config as TheirConfig
from official.utils.testing import mock_task

from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert, get_trainer_sections
from trainer_kit.compat.model_garden.garden_trainer import Trainer, create_task
from trainer_kit.config.experiment_registry import find_trainer_class, lookup_task_class
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError


def _mock_config(**changes: Any) -> Any:
    theirs = exp_factory.get_exp_config("mock")
    theirs.override(changes)
    return theirs


def test_the_sections_are_ours_with_their_values() -> None:
    theirs = _mock_config(
        trainer={"train_steps": 7, "max_to_keep": 2},
        runtime={"num_gpus": 0, "dataset_num_private_threads": 3},
    )
    converted = convert(theirs)

    assert isinstance(converted, ExperimentConfig)
    assert isinstance(converted.trainer, TrainerConfig)
    assert isinstance(converted.runtime, RuntimeConfig)
    assert converted.trainer.train_steps == 7
    assert converted.runtime.dataset_num_private_threads == 3
    # Fields that only our sections have keep their defaults.
    assert converted.trainer.fuse_steps == 1
    assert converted.runtime.random_seed == 1
    assert build_original(converted) == theirs
    assert isinstance(build_original(converted).task, mock_task.MockTaskConfig)


def test_mirroring_that_nobody_asked_for_is_left_to_the_machine() -> None:
    assert convert(_mock_config()).runtime.distribution_strategy == "auto"

    layer = ConfigLayer({"runtime": {"distribution_strategy": "mirrored"}})
    requested = apply_layers(convert(_mock_config()), [layer]).config
    assert requested.runtime.distribution_strategy == "mirrored"

    for other in ("off", "one_device", "tpu"):
        converted = convert(_mock_config(runtime={"distribution_strategy": other}))
        assert converted.runtime.distribution_strategy == other


def test_mirroring_that_another_default_was_replaced_by_stays() -> None:
    @dataclasses.dataclass
    class OneDevice(config_definitions.RuntimeConfig):
        distribution_strategy: str = "one_device"

    theirs = _mock_config()
    theirs.runtime = OneDevice(distribution_strategy="mirrored")
    assert convert(theirs).runtime.distribution_strategy == "mirrored"
    theirs.runtime = OneDevice()
    assert convert(theirs).runtime.distribution_strategy == "auto"


def test_the_best_has_a_folder_even_if_none_was_named() -> None:
    trainer = convert(_mock_config(trainer={"best_checkpoint_eval_metric": "acc"})).trainer
    assert trainer.best_checkpoint_export_subdir == "best_ckpt"
    assert trainer.best_checkpoint_eval_metric == "acc"

    named = convert(_mock_config(trainer={"best_checkpoint_export_subdir": "mine"})).trainer
    assert named.best_checkpoint_export_subdir == "mine"
    assert build_original(convert(_mock_config())).trainer.best_checkpoint_export_subdir == ""


def test_refused_values_are_reported_with_path_and_class() -> None:
    theirs = _mock_config(
        task={"name": "t"},
        trainer={
            "summary_interval": 7,
            "steps_per_loop": 5,
            "optimizer_config": {"learning_rate": {"type": "none_such"}},
        },
        runtime={"distribution_strategy": "none", "num_gpus": -1},
    )

    with pytest.raises(ConfigError) as error:
        convert(theirs)
    origins = {mistake.path: mistake.origin for mistake in error.value.mistakes}
    assert set(origins) == {
        "trainer.optimizer_config.learning_rate.type",
        "runtime.distribution_strategy",
        "runtime.num_gpus",
    }
    assert origins["runtime.num_gpus"] == "official.core.config_definitions.RuntimeConfig"

    theirs.trainer.optimizer_config.learning_rate.type = None
    message = r"trainer.summary_interval .*: 7 is not a multiple of steps_per_loop \(5\)"
    with pytest.raises(ConfigError, match=message):
        convert(theirs)


def test_the_tasks_section_knows_their_task_and_the_trainer() -> None:
    converted = convert(_mock_config(task={"init_checkpoint": "somewhere"}))
    assert lookup_task_class(converted.task) is create_task
    assert find_trainer_class(converted.task) is Trainer

    task = create_task(converted.task, "logs")
    assert type(task) is mock_task.MockTask
    assert task.logging_dir == "logs"
    assert isinstance(task.task_config, mock_task.MockTaskConfig)
    assert task.task_config.init_checkpoint == "somewhere"


@pytest.mark.parametrize("ours", [False, True])
def test_a_trainer_reads_their_task_and_our_other_sections(ours: bool) -> None:
    theirs = _mock_config(trainer={"train_steps": 3})
    task = task_factory.get_task(theirs.task)

    sections = get_trainer_sections(convert(theirs) if ours else theirs, task)

    assert sections.task is (task.task_config if ours else theirs.task)
    assert sections.trainer == convert(theirs).trainer
    assert sections.runtime == convert(theirs).runtime
    assert get_trainer_sections(sections, task) is sections  # anything else is taken as it is


def test_xla_is_for_gpus_that_are_asked_for_as_theirs_has_it() -> None:
    for gpus, compiled in ((0, False), (1, True)):
        converted = convert(_mock_config(runtime={"num_gpus": gpus, "enable_xla": True}))
        assert converted.runtime.enable_xla is compiled


def test_a_field_that_their_config_lacks_has_our_default() -> None:
    partial = TheirConfig(
        default_params={"task": {"model": {"name": "x"}}, "trainer": {"train_steps": 7}}
    )
    converted = convert(partial)

    assert converted.trainer.train_steps == 7
    assert converted.trainer.steps_per_loop == TrainerConfig().steps_per_loop
    assert converted.runtime.distribution_strategy == "auto"
    assert build_original(converted).as_dict() == partial.as_dict()


@pytest.mark.parametrize(
    ("dtype", "counts"), [(None, False), ("bfloat16", False), ("float16", True)]
)
def test_a_loss_scale_counts_with_float16_only(dtype: str | None, counts: bool) -> None:
    config = _mock_config()
    config.override({"runtime": {"mixed_precision_dtype": dtype, "loss_scale": "dynamic"}})
    converted = convert(config)

    assert (converted.runtime.loss_scale == "dynamic") is counts
    assert build_original(converted).runtime.loss_scale == "dynamic"
