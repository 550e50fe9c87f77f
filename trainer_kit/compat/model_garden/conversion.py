"""Translates Model Garden's ExperimentConfig to trainer_kit's.

Tasks still get their Model Garden section.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.multitask.configs import MultiTaskConfig

from trainer_kit.compat.model_garden.config_classes import (
    MirrorMixin,
    build_original,
    mirror,
    prefix_mistakes,
)
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake

if TYPE_CHECKING:
    from types import SimpleNamespace

    from trainer_kit.compat.model_garden.garden_types import ExperimentParams, GardenTask

_PACKAGE = "trainer_kit.compat.model_garden"

# Of experiments with one task, and of those with several.
_TASK = f"{_PACKAGE}.garden_trainer:create_task"
_TRAINER = f"{_PACKAGE}.garden_trainer:Trainer"
_TASKS = f"{_PACKAGE}.multitask.train_lib:create_task"
_TRAINERS = f"{_PACKAGE}.multitask.train_lib:MultiTaskTrainerFactory"


@dataclass(frozen=True)
class TrainerSections:
    """The config sections that a Trainer reads.

    Attributes:
      task: Model Garden's section, like `Task.task_config`. For several tasks, an object with the
        section of the training data of each.
      trainer, runtime: trainer_kit's sections.
    """

    task: TheirConfig | SimpleNamespace
    trainer: TrainerConfig
    runtime: RuntimeConfig


@configclass
class _SeparateEvalTaskConfig(Config):
    """The task's section in an experiment with separate evaluation tasks.

    Equal sections share a class, and the trainer is registered for the class. This base gives them
    another class.
    """


def find_broken_rules(config: ExperimentParams) -> list[Mistake]:
    """Returns a mistake for each Model Garden restriction that `config` breaks.

    A restriction is a text such as `task.model.num_classes > 0`.

    Args:
      config: A config of Model Garden, converted or not. Any other config has no restrictions.
    """
    is_mirror = isinstance(config, ExperimentConfig) and isinstance(config, MirrorMixin)
    original = build_original(config) if is_mirror else config

    if not isinstance(original, TheirConfig):
        return []

    # Model Garden's method stops at the first broken restriction.
    mistakes = []
    for restriction in original._restrictions:
        restricted = copy.copy(original)
        restricted._restrictions = [restriction]
        try:
            restricted.validate()
        except (KeyError, ValueError):
            path = re.split(r"[=!<>\s]", restriction, maxsplit=1)[0]
            mistakes.append(Mistake(path, f"breaks the experiment's rule {restriction!r}"))
    return mistakes


def convert(config: ExperimentParams) -> ExperimentConfig:
    """Returns a Model Garden ExperimentConfig as a checked config of trainer_kit.

    A trainer_kit config is returned unchanged. Missing sections and values have trainer_kit's
    defaults. Four values have another meaning here:
      A strategy left at Model Garden's default, `mirrored`, becomes `auto`: mirroring over one
        device is up to 3 times as slow.
      With a best metric but no folder, the folder is `best_ckpt`.
      `enable_xla` applies to one GPU only: Model Garden ignores it without `num_gpus`, as several
        of its experiments require, and XLA cannot compile the step of several replicas.
      `loss_scale` applies to float16 only: Model Garden ignores it for other types.

    Raises:
      ConfigError: When trainer_kit does not allow a value.
    """
    if isinstance(config, ExperimentConfig):
        return config

    trains_several = isinstance(config.task, MultiTaskConfig)
    has_eval_tasks = hasattr(config, "eval_tasks")
    task_base = _SeparateEvalTaskConfig if has_eval_tasks else Config

    # One report has the mistakes of all sections.
    sections: dict[str, Config] = {}
    mistakes: list[Mistake] = []
    for name in ("task", "trainer", "runtime"):
        section = getattr(config, name, None)
        try:
            with prefix_mistakes(name):
                if name == "task":
                    sections[name] = mirror(section, task_base)
                elif name == "trainer" and section is not None:
                    sections[name] = _mirror_trainer_section(section)
                elif section is not None:
                    changes = _runtime_changes(section)
                    sections[name] = mirror(section, RuntimeConfig, **changes)
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)

    # The run finds its task and its trainer by the class of the section.
    task = _TASKS if trains_several else _TASK
    trainer = _TRAINERS if trains_several or has_eval_tasks else _TRAINER
    register_task(type(sections["task"]), task, trainer=trainer)
    converted: ExperimentConfig = mirror(config, ExperimentConfig, **sections)
    return converted


def _mirror_trainer_section(trainer: TheirConfig) -> Config:
    """Returns the mirror of a trainer section, with the changes of `convert`."""
    changes: dict[str, object] = {}
    subfolder = getattr(trainer, "best_checkpoint_export_subdir", "")
    subfolder = subfolder or TrainerConfig().best_checkpoint_export_subdir
    changes["best_checkpoint_export_subdir"] = subfolder

    optimizer = getattr(trainer, "optimizer_config", None)
    if optimizer is not None:
        with prefix_mistakes("optimizer_config"):
            changes["optimizer_config"] = mirror(optimizer)
    mirrored: Config = mirror(trainer, TrainerConfig, **changes)
    return mirrored


def _runtime_changes(runtime: TheirConfig) -> dict[str, object]:
    """Returns the values of a runtime section that `convert` changes."""
    changes: dict[str, object] = {}
    default = getattr(type(runtime)(), "distribution_strategy", None)
    if getattr(runtime, "distribution_strategy", None) == default:
        changes["distribution_strategy"] = "auto"
    if getattr(runtime, "num_gpus", 0) != 1:
        changes["enable_xla"] = False
    dtype = str(getattr(runtime, "mixed_precision_dtype", None))
    if "16" not in dtype.replace("bfloat16", ""):
        changes["loss_scale"] = None
    return changes


def get_trainer_sections(
    config: ExperimentParams | TrainerSections, task: GardenTask
) -> TrainerSections:
    """Returns the sections of `config` that a Trainer of `task` reads.

    Args:
      config: An ExperimentConfig of either framework, or the sections themselves.
      task: A Model Garden task, which has its own section.
    """
    if isinstance(config, ExperimentConfig):
        return TrainerSections(task.task_config, config.trainer, config.runtime)
    if isinstance(config, TheirConfig):
        converted = convert(config)
        return TrainerSections(config.task, converted.trainer, converted.runtime)
    return config
