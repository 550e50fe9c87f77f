"""Translates an ExperimentConfig of Model Garden to one of trainer_kit; tasks still get their own section."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.multitask.configs import MultiTaskConfig

from trainer_kit.compat.model_garden.config.config_classes import Mirrored, mirror, original, told_under
from trainer_kit.config.experiments import register_task
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake

_DOOR = "trainer_kit.compat.model_garden"
_TASK, _TRAINER = f"{_DOOR}.training.tasks:create_task", f"{_DOOR}.training.trainer:Trainer"
_TASKS, _TRAINERS = f"{_DOOR}.multitask.creation:create_task", f"{_DOOR}.multitask.creation:MultiTaskTrainers"
_SEPARATE = f"{_DOOR}.multitask.separate_evaluation:SeparateTrainers"


@dataclass(frozen=True)
class Sections:
    """What a Trainer reads: the sections trainer and runtime of trainer_kit, and the task's of Model Garden.

    Attributes:
      task: of Model Garden, as `Task.task_config`.
      trainer, runtime: of trainer_kit.
    """

    task: Any
    trainer: TrainerConfig
    runtime: RuntimeConfig


@configclass
class _Separate(Config):
    """A task's section in an experiment that is evaluated by others: equal sections have one class, and this another.

    The trainer is bound to the class.
    """


def broken_rules(config: Any) -> list[Mistake]:
    """Returns a mistake for each restriction of Model Garden, as `task.model.num_classes > 0`, that `config` breaks.

    Args:
      config: of Model Garden, or converted; any other has no restrictions.
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
    """Returns an ExperimentConfig of Model Garden as one of trainer_kit, checked; one of trainer_kit stays as it is.

    Four values mean something else here. A strategy left at Model Garden's default, `mirrored`, is `auto`: mirroring
    over one device is up to 3 times as slow. With a best metric but no folder for it, the folder is `best_ckpt`.
    `enable_xla` counts for one GPU only: Model Garden ignores it without `num_gpus`, which several of its experiments
    need, and the step of several replicas cannot be a program of XLA. `loss_scale` counts for float16 only: Model
    Garden ignores it with another type. A section or a value that is missing has trainer_kit's default.

    Raises:
      ConfigError: when trainer_kit does not allow a value.
    """
    if isinstance(theirs, ExperimentConfig):
        return theirs
    several = isinstance(theirs.task, MultiTaskConfig)
    evaluated = _SEPARATE if hasattr(theirs, "eval_tasks") else None
    makers: dict[str, Callable[[], Config]] = {"task": lambda: mirror(theirs.task, _Separate if evaluated else Config)}
    if hasattr(theirs, "trainer"):
        makers["trainer"] = lambda: _mirrored_trainer(theirs.trainer)
    if hasattr(theirs, "runtime"):
        makers["runtime"] = lambda: mirror(theirs.runtime, RuntimeConfig, **_chosen_runtime(theirs.runtime))
    parts = _together(**makers)
    trains = evaluated or (_TRAINERS if several else _TRAINER)
    register_task(type(parts["task"]), _TASKS if several else _TASK, trainer=trains)
    converted: ExperimentConfig = mirror(theirs, ExperimentConfig, **parts)
    return converted


def _mirrored_trainer(trainer: TheirConfig) -> Config:
    best = getattr(trainer, "best_checkpoint_export_subdir", "") or TrainerConfig().best_checkpoint_export_subdir
    optimizer = getattr(trainer, "optimizer_config", None)
    parts = _together(optimizer_config=lambda: mirror(optimizer)) if optimizer is not None else {}
    made: Config = mirror(trainer, TrainerConfig, best_checkpoint_export_subdir=best, **parts)
    return made


def _chosen_runtime(runtime: TheirConfig) -> dict[str, Any]:
    """Returns the values of a runtime section that are something else here; see `convert`."""
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
    """Returns the sections by name; raises the mistakes of all of them in one ConfigError, by their whole paths."""
    made: dict[str, Config] = {}
    mistakes: list[Mistake] = []
    for name, make in sections.items():
        try:
            with told_under(name):
                made[name] = make()
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return made


def sections(config: Any, task: Any) -> Any:
    """Returns what a Trainer of `task` reads of `config`.

    Args:
      config: an ExperimentConfig of either, or anything with the sections trainer and runtime of trainer_kit.
      task: of Model Garden, which has its own section.
    """
    if isinstance(config, ExperimentConfig):
        return Sections(task.task_config, config.trainer, config.runtime)
    if isinstance(config, TheirConfig):
        converted = convert(config)
        return Sections(config.task, converted.trainer, converted.runtime)
    return config
