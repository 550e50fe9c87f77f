"""Whether training steps can be one program of XLA, as far as that is known before they are tried."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import ONE_REPLICA
from trainer_kit.errors import UsageError


def problem_of_fusing(config: Any, strategy: tf.distribute.Strategy, given: Any, own_loop: str) -> str:
    """Returns why training steps cannot be one program of XLA, as far as that is known before they are tried.

    Args:
      config: of the trainer.
      strategy: of the trainer.
      given: a ready-made dataset in place of the task's; None: there is none.
      own_loop: the class that makes the training loop itself; "" if none does.
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
    """Raises UsageError when more than one training step is to be one program of XLA, and there is a problem."""
    if fuse_steps > 1 and problem:
        raise UsageError(f"trainer.fuse_steps={fuse_steps}: {problem}; change that, or set trainer.fuse_steps to 1")
