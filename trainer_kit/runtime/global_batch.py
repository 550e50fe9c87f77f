"""Shares a global batch among the replicas. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_kit.config.schema.number_types import describe_uneven_batch
from trainer_kit.errors import ConfigError, Mistake


def split_global_batch(global_batch_size: int, num_replicas: int, path: str) -> int:
    """Returns the number of examples that each replica gets of a global batch.

    Args:
      global_batch_size: The number of examples in the global batch.
      num_replicas: The number of replicas of all workers together.
      path: The dotted path of the batch size in the config, for the message.

    Raises:
      ConfigError: when the batch cannot be shared equally. The message names the nearest sizes that
        can.
    """
    per_replica, rest = divmod(global_batch_size, num_replicas)
    if global_batch_size < 1:
        problem = f"a batch of {global_batch_size} examples is empty"
        advice = f"use {num_replicas} or a multiple of it" if num_replicas > 1 else "use 1 or more"
        raise ConfigError([Mistake(path, problem, advice)])
    if rest:
        raise ConfigError([Mistake(path, describe_uneven_batch(global_batch_size, num_replicas))])
    return per_replica


@contextmanager
def explain_uneven_batch(global_batch_size: int, num_replicas: int, path: str) -> Iterator[None]:
    """Turns TensorFlow's error about an uneven batch into a config mistake with path and advice.

    TensorFlow's `get_per_replica_batch_size` raises that error. Only tf.data pipelines need an even
    batch: a Source splits a batch of any size between replicas for evaluation.

    Raises:
      ConfigError: when the batch cannot be divided evenly, instead of TensorFlow's ValueError.
    """
    try:
        yield
    except ValueError as error:
        if "not divisible" in str(error):
            split_global_batch(global_batch_size, num_replicas, path)
        raise
