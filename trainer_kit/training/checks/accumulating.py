"""Checks whether the batches of a trainer can be split into micro-batches (trainer.accumulate_steps)."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_parts.frozen_variables import layers_below

_LOG = logging.getLogger(__name__)
_PATH = "trainer.accumulate_steps"


def check_accumulating(trainer: Any, step: Any, steps: int) -> None:
    """Raises an error when a trainer cannot split its batches; called when the trainer is created.

    Args:
      trainer: The trainer.
      step: The trainer's method that runs a step on a replica.
      steps: The number of micro-batches, above 1.

    Raises:
      UsageError: when the trainer, its strategy or its optimizer cannot do it.
    """
    name = trainer.class_name
    problem = ""
    if isinstance(trainer.strategy, tf.distribute.experimental.ParameterServerStrategy):
        problem = "workers of a ParameterServerStrategy update by themselves; set it to 1, or take another strategy"
    elif trainer.has_own_loop:
        problem = f"{name} builds its own training loop in create_train_loop_fn; set it to 1, or remove that method"
    elif step.__module__ != "trainer_kit.training.trainer":
        problem = (
            f"{name} has a training step of its own on each replica, which is not split into micro-batches; set it to 1"
        )
    elif any(hasattr(optimizer, "get_scaled_loss") for optimizer in tf.nest.flatten(trainer.optimizer)):
        # Tasks recognise such an optimizer by its class, and would not scale.
        problem = "an optimizer of tf_keras scales the loss, which cannot be split; train in float32 or bfloat16"
    if problem:
        raise UsageError(f"{_PATH}={steps}: {problem}")


def less_memory_advice(steps: int, examples: int) -> str:
    """Returns the advice for a step that ran out of memory.

    Args:
      steps: The number of micro-batches that the step has.
      examples: The number of examples in a batch of a replica; 0: not known.
    """
    if 0 < examples <= steps:
        return f"{_PATH}={steps} trains on one example at a time; take a smaller model or smaller examples"
    return f"try {_PATH}={2 * steps}, which trains on a batch in so many parts, one after the other, with one update"


def warn_of_batch_normalization(model: Any, steps: int) -> None:
    """Warns when a model has batch normalization, whose layers see micro-batches."""
    names = [
        getattr(layer, "name", type(layer).__name__)
        for layer in (model, *layers_below(model))
        if any("BatchNormalization" in kind.__name__ for kind in type(layer).__mro__)
    ]
    if names:
        others = f" and {len(names) - 1} more" if names[1:] else ""
        _LOG.warning(
            "%s=%d: batch normalization (%s) takes mean and variance of micro-batches, so the result differs from "
            "that of whole batches; layer or group normalization does not depend on the batch",
            *(_PATH, steps, names[0] + others),
        )
