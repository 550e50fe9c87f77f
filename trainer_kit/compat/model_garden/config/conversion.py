"""Model Garden's ExperimentConfig <-> ours: trainer and runtime become sections of ours, the task's stays theirs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.multitask.configs import MultiTaskConfig

from trainer_kit.compat.model_garden.config.config_classes import mirror, original, told_under
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
    """What a Trainer reads: the trainer and runtime sections as ours, and the task's as theirs.

    Attributes:
      task: of their class, as `Task.task_config`.
      trainer, runtime: of ours.
    """

    task: Any
    trainer: TrainerConfig
    runtime: RuntimeConfig


@configclass
class _Separate(Config):
    """A task's section in an experiment that is evaluated by others: equal sections have one class, and this another.

    The trainer is bound to the class.
    """


@configclass
class _Restricted(ExperimentConfig):
    """An ExperimentConfig with the rules of theirs, which are text: `task.model.num_classes > 0`.

    A rule that the config as it is registered breaks stands for a value that only a user can know; see broken_rules.
    """

    def rules(self) -> Iterator[tuple[str, str]]:
        """Ours, and theirs."""
        yield from super().rules()
        made_of = getattr(type(self), "made_of", None)  # none while the first one of a class is made
        if made_of is not None and (restrictions := _unbroken(made_of[0])):
            yield from _broken(original(self), restrictions)


def broken_rules(config: Any) -> list[Mistake]:
    """Returns a mistake for each rule of theirs that `config`, theirs or converted, breaks, before it is run."""
    if isinstance(config, _Restricted):
        theirs: TheirConfig = type(config).made_of[0]  # type: ignore[attr-defined]
        unmet = set(theirs._restrictions) - set(_unbroken(theirs))
        return [Mistake(path, problem) for path, problem in _broken(original(config), sorted(unmet))]
    if isinstance(config, TheirConfig):
        return [Mistake(path, problem) for path, problem in _broken(config, config._restrictions)]
    return []


def _unbroken(theirs: TheirConfig) -> list[str]:
    return [one for one in theirs._restrictions if not any(_broken(theirs, [one]))]


def _broken(theirs: TheirConfig, restrictions: Sequence[str]) -> Iterator[tuple[str, str]]:
    for restriction in restrictions:
        one = copy.copy(theirs)
        one._restrictions = [restriction]
        try:
            one.validate()
        except (KeyError, ValueError):
            path = re.split(r"[=!<>\s]", restriction, maxsplit=1)[0]
            yield path, f"breaks the experiment's rule {restriction!r}"


def convert(theirs: Any) -> ExperimentConfig:
    """Returns their ExperimentConfig as ours, checked; a config of ours is returned as it is.

    What means something else here: a strategy left at theirs, `mirrored`, is `auto`, since mirroring over one device is
    up to 3 times as slow; and with a best metric but no folder for it, the folder is `best_ckpt`. `enable_xla`
    is for one GPU: without `num_gpus`, as several of their experiments have it, theirs ignores it, and here the step of
    several replicas cannot be a program of XLA. `loss_scale` is for float16: with another type theirs ignores it. What
    a config of theirs does not have, a section or a value, has our default.

    Raises:
      ConfigError: when a value is one that our engine does not allow.
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
    converted: ExperimentConfig = mirror(theirs, _Restricted, **parts)
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
      config: their ExperimentConfig, ours, or anything with the sections trainer and runtime as ours.
      task: theirs, which has its own section.
    """
    if isinstance(config, ExperimentConfig):
        return Sections(task.task_config, config.trainer, config.runtime)
    if isinstance(config, TheirConfig):
        converted = convert(config)
        return Sections(config.task, converted.trainer, converted.runtime)
    return config
