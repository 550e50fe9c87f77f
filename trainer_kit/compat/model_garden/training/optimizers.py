"""Checks and creates Model Garden's optimizers, and creates their variables before a checkpoint is restored."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tf_keras
from official.core import base_task
from official.core.train_utils import create_optimizer as model_gardens
from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.multitask.multitask import MultiTask

from trainer_kit.compat.model_garden.config.build_errors import told
from trainer_kit.compat.model_garden.config.config_classes import original
from trainer_kit.compat.model_garden.config.conversion import broken_rules
from trainer_kit.compat.model_garden.config.required_values import unset_optimization, unset_values
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError, Mistake

_THEIR_WAYS = [one.create_optimizer.__func__ for one in (base_task.Task, MultiTask)]


def check_values(task: Any, params: Any) -> None:
    """Checks the optimizer's values, the restrictions, and the model's number of classes before anything is built.

    A task with its own create_optimizer has to accept dp_config if the config asks for differential privacy. With zero
    classes Keras would build a layer that ends the process in the first step.

    Args:
      task: A task or a MultiTask of Model Garden.
      params: The experiment's config, Model Garden's or trainer_kit's.

    Raises:
      ConfigError: naming every value that is missing or wrong.
    """
    own_way = getattr(task.create_optimizer, "__func__", None) not in _THEIR_WAYS
    found = broken_rules(params) + ([] if own_way else unset_optimization(params.trainer.optimizer_config))
    private = getattr(params.task, "differential_privacy_config", None) is not None
    if private and "dp_config" not in inspect.signature(task.create_optimizer).parameters:
        problem = f"{type(task).__name__}.create_optimizer has no argument dp_config"
        found.append(Mistake("task.differential_privacy_config", problem, "remove this section, or add the argument"))
    if type(task).__module__.startswith("official.") and isinstance(getattr(task, "task_config", None), TheirConfig):
        found += [one for one in unset_values(task.task_config, "model") if found or one.path.endswith("classes")]
    if found:
        raise ConfigError(found)


def create_optimizer(task: Any, params: Any) -> Any:
    """Returns the optimizer that `task` creates from `params`, a config of either framework; called in strategy scope.

    Raises:
      UsageError: when the optimizer cannot be created from the config.
    """
    options = params.trainer.optimizer_config
    if isinstance(params, ExperimentConfig):
        options = original(options)
    sections = SimpleNamespace(
        task=params.task, trainer=SimpleNamespace(optimizer_config=options), runtime=params.runtime
    )
    with told("trainer.optimizer_config", getattr(task, "task_config", None), options):
        return model_gardens(task, sections)


def make_whole(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates all variables of a Keras 2 optimizer, which would else come in the first step.

    Runs eagerly, in strategy scope.

    A checkpoint is restored strictly into existing variables, before the first step.

    Args:
      optimizer: A Keras 2 optimizer, legacy or not, wrapped for loss scaling or not; others are left unchanged.
      variables: The variables that the optimizer will train.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
        inner._create_all_weights(variables)
    elif isinstance(inner, tf_keras.optimizers.Optimizer):
        inner.build(variables)
