"""Translates Model Garden's ExperimentConfig to trainer_kit's; tasks still get their Model Garden section."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.multitask.configs import MultiTaskConfig

from trainer_kit.compat.model_garden.config_classes import Mirrored, mirror, original, prefix_mistakes
from trainer_kit.config.experiments import register_task
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake

_DOOR = "trainer_kit.compat.model_garden"
_TASK, _TRAINER = f"{_DOOR}.trainer:create_task", f"{_DOOR}.trainer:Trainer"
_TASKS, _TRAINERS = f"{_DOOR}.multitask.train_lib:create_task", f"{_DOOR}.multitask.train_lib:MultiTaskTrainers"


@dataclass(frozen=True)
class Sections:
    """The config sections that a Trainer reads.

    Attributes:
      task: Model Garden's section, like `Task.task_config`.
      trainer, runtime: trainer_kit's sections.
    """

    task: Any
    trainer: TrainerConfig
    runtime: RuntimeConfig


@configclass
class _SeparateTask(Config):
    """The task's section in an experiment with separate evaluation tasks.

    Equal sections share a class, and the trainer is registered for the class; this base gives them another class.
    """


def broken_rules(config: Any) -> list[Mistake]:
    """Returns a mistake for each Model Garden restriction, such as `task.model.num_classes > 0`, that `config` breaks.

    Args:
      config: A config of Model Garden, converted or not; any other config has no restrictions.
    """
    theirs = original(config) if isinstance(config, ExperimentConfig) and isinstance(config, Mirrored) else config
    found = []
    for restriction in theirs._restrictions if isinstance(theirs, TheirConfig) else ():
        one = copy.copy(theirs)
        one._restrictions = [restriction]
        try:
            one.validate()
        except (KeyError, ValueError):
            path = re.split(r"[=!<>\s]", restriction, maxsplit=1)[0]
            found.append(Mistake(path, f"breaks the experiment's rule {restriction!r}"))
    return found


def convert(theirs: Any) -> ExperimentConfig:
    """Returns a Model Garden ExperimentConfig as a checked trainer_kit one; a trainer_kit config is returned unchanged.

    Four values have another meaning here. A strategy left at Model Garden's default, `mirrored`, becomes `auto`:
    mirroring over one device is up to 3 times as slow. With a best metric but no folder, the folder is `best_ckpt`.
    `enable_xla` applies to one GPU only: Model Garden ignores it without `num_gpus`, as several of its experiments
    require, and XLA cannot compile the step of several replicas. `loss_scale` applies to float16 only: Model Garden
    ignores it for other types. Missing sections and values have trainer_kit's defaults.

    Raises:
      ConfigError: when trainer_kit does not allow a value.
    """
    if isinstance(theirs, ExperimentConfig):
        return theirs
    trains_several = isinstance(theirs.task, MultiTaskConfig)
    has_eval_tasks = hasattr(theirs, "eval_tasks")
    base = _SeparateTask if has_eval_tasks else Config
    makers: dict[str, Callable[[], Config]] = {"task": lambda: mirror(theirs.task, base)}
    if hasattr(theirs, "trainer"):
        makers["trainer"] = lambda: _mirrored_trainer(theirs.trainer)
    if hasattr(theirs, "runtime"):
        makers["runtime"] = lambda: mirror(theirs.runtime, RuntimeConfig, **_chosen_runtime(theirs.runtime))
    parts = _together(**makers)
    trainer = _TRAINERS if trains_several or has_eval_tasks else _TRAINER
    register_task(type(parts["task"]), _TASKS if trains_several else _TASK, trainer=trainer)
    converted: ExperimentConfig = mirror(theirs, ExperimentConfig, **parts)
    return converted


def _mirrored_trainer(trainer: TheirConfig) -> Config:
    best = getattr(trainer, "best_checkpoint_export_subdir", "") or TrainerConfig().best_checkpoint_export_subdir
    optimizer = getattr(trainer, "optimizer_config", None)
    parts = _together(optimizer_config=lambda: mirror(optimizer)) if optimizer is not None else {}
    made: Config = mirror(trainer, TrainerConfig, best_checkpoint_export_subdir=best, **parts)
    return made


def _chosen_runtime(runtime: TheirConfig) -> dict[str, Any]:
    """Returns the values of a runtime section that `convert` changes."""
    chosen: dict[str, Any] = {}
    strategy, default = (getattr(one, "distribution_strategy", None) for one in (runtime, type(runtime)()))
    if strategy == default:
        chosen["distribution_strategy"] = "auto"
    if getattr(runtime, "num_gpus", 0) != 1:
        chosen["enable_xla"] = False
    if "16" not in str(getattr(runtime, "mixed_precision_dtype", None)).replace("bfloat16", ""):
        chosen["loss_scale"] = None
    return chosen


def _together(**sections: Callable[[], Config]) -> dict[str, Config]:
    """Returns the sections by name; raises one ConfigError with the mistakes of all sections, by their full paths."""
    made: dict[str, Config] = {}
    mistakes: list[Mistake] = []
    for name, make in sections.items():
        try:
            with prefix_mistakes(name):
                made[name] = make()
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return made


def sections(config: Any, task: Any) -> Any:
    """Returns the sections of `config` that a Trainer of `task` reads.

    Args:
      config: An ExperimentConfig of either framework, or an object with trainer_kit's sections trainer and runtime.
      task: A Model Garden task, which has its own section.
    """
    if isinstance(config, ExperimentConfig):
        return Sections(task.task_config, config.trainer, config.runtime)
    if isinstance(config, TheirConfig):
        converted = convert(config)
        return Sections(config.task, converted.trainer, converted.runtime)
    return config
