"""What a trainer needs of its config, its model and its strategy, checked when it is made."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError


def check_sections(config: Any, train_data: bool, validation_data: bool) -> None:
    """Raises AttributeError when `config` lacks a section: trainer, task, runtime, and the data that is needed."""
    for name in ("trainer", "task", "runtime"):
        if not hasattr(config, name):
            raise AttributeError(f"the trainer needs a config with a section {name!r}")
    for wanted, name in ((train_data, "train_data"), (validation_data, "validation_data")):
        if wanted and not hasattr(config.task, name):
            raise AttributeError(f"the trainer needs a config with a section 'task.{name}', or a ready-made dataset")


def check_model(model: Any, enable_xla: bool, strategy: tf.distribute.Strategy) -> None:
    """Raises UsageError when the model has no variables yet, or XLA is asked for with several replicas."""
    if not getattr(model, "variables", None):
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet; build it in build_model, "
            "for instance by calling it once on a batch of zeros"
        )
    if enable_xla and strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"runtime.enable_xla needs one replica, and there are {strategy.num_replicas_in_sync}: XLA "
            "cannot update mirrored variables; set enable_xla=false or distribution_strategy=one_device"
        )
