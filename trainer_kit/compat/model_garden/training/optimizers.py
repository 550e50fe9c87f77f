"""Optimizers of Model Garden: checked, made, and made whole before a checkpoint is restored into them."""

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
    """Checks, before anything is built, the optimizer's values, the restrictions, and the number of a model's classes.

    A task may have its own way to make an optimizer, which has to know of differential privacy if the config asks for
    that. Of no classes at all Keras makes a layer, which then ends the process in the first step.

    Args:
      task: a task or a MultiTask of Model Garden.
      params: the experiment's config, of Model Garden or of trainer_kit.

    Raises:
      ConfigError: naming all that has no value, or a wrong one.
    """
    own_way = getattr(task.create_optimizer, "__func__", None) not in _THEIR_WAYS
    found = broken_rules(params) + ([] if own_way else unset_optimization(params.trainer.optimizer_config))
    private = getattr(params.task, "differential_privacy_config", None) is not None
    if private and "dp_config" not in inspect.signature(task.create_optimizer).parameters:
        problem = f"{type(task).__name__}.create_optimizer takes no dp_config"
        found.append(Mistake("task.differential_privacy_config", problem, "remove it, or add that argument"))
    if type(task).__module__.startswith("official.") and isinstance(getattr(task, "task_config", None), TheirConfig):
        found += [one for one in unset_values(task.task_config, "model") if found or one.path.endswith("classes")]
    if found:
        raise ConfigError(found)


def create_optimizer(task: Any, params: Any) -> Any:
    """Returns the optimizer that `task` makes of `params`, of Model Garden or of trainer_kit; in strategy scope.

    Raises:
      UsageError: when it cannot be made of what the config says.
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
    """Makes all variables of an optimizer of Keras 2, which it would make in the first step; eager, in strategy scope.

    A checkpoint is restored strictly into what there is, and before the first step.

    Args:
      optimizer: of either kind of Keras 2, wrapped for loss scaling or not; any other is left alone.
      variables: that it will train.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
        inner._create_all_weights(variables)
    elif isinstance(inner, tf_keras.optimizers.Optimizer):
        inner.build(variables)
