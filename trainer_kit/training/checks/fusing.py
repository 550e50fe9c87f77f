"""Checks whether training steps can be fused in one XLA program, as far as that is known before a try."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import ONE_REPLICA
from trainer_kit.errors import UsageError


def problem_of_fusing(config: Any, strategy: tf.distribute.Strategy, given: Any, own_loop: str) -> str:
    """Returns why training steps cannot be fused in one XLA program, as far as known before a try; "" if none.

    Args:
      config: The experiment's config.
      strategy: The trainer's strategy.
      given: A ready-made dataset that replaces the task's; None: there is none.
      own_loop: The name of a class that overrides create_train_loop_fn; "" if there is none.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        return f"there are {replicas} replicas, and {ONE_REPLICA}"
    if isinstance(strategy, (tf.distribute.experimental.ParameterServerStrategy, tf.distribute.TPUStrategy)):
        return f"{type(strategy).__name__} compiles its loops by itself, or not at all"
    if not config.trainer.train_tf_while_loop:
        return "trainer.train_tf_while_loop is false"
    if config.runtime.run_eagerly:
        return "runtime.run_eagerly is true"
    if own_loop:
        return f"{own_loop} builds its own training loop in create_train_loop_fn"
    if given is not None and not isinstance(given, tf.data.Dataset):
        return "the ready-made dataset is already distributed, and fused steps need a tf.data.Dataset"
    return ""


def check_fusing(fuse_steps: int, problem: str) -> None:
    """Raises UsageError when `fuse_steps` is above 1 and `problem` is not empty."""
    if fuse_steps > 1 and problem:
        raise UsageError(f"trainer.fuse_steps={fuse_steps}: {problem}; change that, or set trainer.fuse_steps to 1")
