"""Checks whether the batches of a trainer can be split into micro-batches (trainer.accumulate_steps)."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.distribution.collectives import worker_count
from trainer_kit.errors import ConfigError, Mistake, UsageError

_LOG = logging.getLogger(__name__)
_PATH = "trainer.accumulate_steps"


def check_accumulating(trainer: Any, step: Any, steps: int | str) -> None:
    """Raises an error when a trainer cannot split its batches; called when the trainer is created.

    Args:
      trainer: The trainer.
      step: The trainer's method that runs a step on a replica.
      steps: The number of micro-batches, or auto; not 1.

    Raises:
      UsageError: when the trainer or its strategy cannot do it.
      ConfigError: when a replica gets fewer examples of a batch than there are micro-batches.
    """
    if problem := _problem(trainer, step) or (_problem_of_auto(trainer) if steps == "auto" else ""):
        raise UsageError(f"{_PATH}={steps}: {problem}")
    replicas, batch = trainer.strategy.num_replicas_in_sync, global_batch_size(trainer)
    if steps != "auto" and 0 < batch // replicas < int(steps):
        problem = f"{steps} micro-batches need as many examples, and a replica gets {batch // replicas} of a batch"
        shared = f"task.train_data.global_batch_size={batch}, {replicas} {'replica' if replicas == 1 else 'replicas'}"
        raise ConfigError([Mistake(_PATH, f"{problem} ({shared})", f"set at most {batch // replicas}")])


def global_batch_size(trainer: Any) -> int:
    """Returns the number of examples in a batch of the training data; 0 if the config does not say it."""
    data = getattr(trainer.config.task, "train_data", None)
    return int(getattr(data, "global_batch_size", 0) or 0)


def warn_of_batch_normalization(model: Any, steps: int) -> None:
    """Warns when a model has batch normalization, whose layers see micro-batches."""
    found = [layer for layer in _layers(model) if _is_batch_normalization(layer)]
    if found:
        others = f" and {len(found) - 1} more" if found[1:] else ""
        _LOG.warning(
            "%s=%d: batch normalization (%s) takes mean and variance of micro-batches, so the result differs from "
            "that of whole batches; layer or group normalization does not depend on the batch",
            *(_PATH, steps, getattr(found[0], "name", type(found[0]).__name__) + others),
        )


def _problem(trainer: Any, step: Any) -> str:
    name = trainer.class_name
    if isinstance(trainer.strategy, tf.distribute.experimental.ParameterServerStrategy):
        return "workers of a ParameterServerStrategy update by themselves; set it to 1, or train with another strategy"
    if trainer.has_own_loop:
        return f"{name} builds its own training loop in create_train_loop_fn; set it to 1, or remove that method"
    if step.__module__ != "trainer_kit.training.trainer":
        return (
            f"{name} has a training step of its own on each replica, which is not split into micro-batches; set it to 1"
        )
    return ""


def _problem_of_auto(trainer: Any) -> str:
    if (workers := worker_count(trainer.strategy)) > 1:
        return (
            f"each of the {workers} workers would choose a number of its own; set a number, which a run on one of the "
            "workers with the same batch for each replica can choose"
        )
    options = trainer.config.trainer
    if not options.train_tf_function or trainer.config.runtime.run_eagerly or tf.config.functions_run_eagerly():
        return "the trial of a number needs training steps that run as a graph, and they run eagerly; set a number"
    return ""


def _layers(model: Any) -> list[Any]:
    """Returns all layers in a model of either Keras or in a tf.Module, and the model itself."""
    found: dict[int, Any] = {}
    left = [model]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += one.submodules if isinstance(one, tf.Module) else _held_layers(one)
    return list(found.values())


def _held_layers(layer: Any) -> list[Any]:
    """Returns the layers of Keras 3 in the attributes of a layer, also in lists and dicts."""
    found: list[Any] = []
    for value in getattr(layer, "__dict__", {}).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [item for item in items if isinstance(item, (keras.Layer, tf.Module))]
    return found


def _is_batch_normalization(layer: Any) -> bool:
    return any("BatchNormalization" in kind.__name__ for kind in type(layer).__mro__)
