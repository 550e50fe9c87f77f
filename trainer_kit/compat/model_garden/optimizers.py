"""Optimizers of Keras 2, made whole before a checkpoint is restored into them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import tf_keras

from trainer_kit.compat.model_garden.mirror import original
from trainer_kit.config.schema import ExperimentConfig


def create_optimizer(task: Any, params: Any) -> Any:
    """Returns the optimizer that `task` makes of `params`, a config of theirs or of ours; in strategy scope."""
    options = params.trainer.optimizer_config
    if isinstance(params, ExperimentConfig):
        options = original(options)
    arguments: dict[str, Any] = {}
    if "dp_config" in inspect.signature(task.create_optimizer).parameters:
        arguments["dp_config"] = getattr(params.task, "differential_privacy_config", None)
    return task.create_optimizer(options, params.runtime, **arguments)


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
