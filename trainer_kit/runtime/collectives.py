"""The workers that train together: their number, their roles, and collective operations among them.

Each operation is a sum over all workers: all of them have to call it, in the same order.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.runtime.tf_config import NO_PARAMETER_SERVERS

_LOG = logging.getLogger(__name__)

# Seconds.
_EXIT_DELAY = 1.0


def resolve_strategy(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy:
    """Returns `strategy`, or else the current strategy.

    Warns when a multi-worker strategy has only one worker.

    Raises:
      UsageError: for parameter servers.
    """
    strategy = strategy or tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        raise UsageError(f"distribution_strategy: {NO_PARAMETER_SERVERS}")

    is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if is_multi_worker and worker_count(strategy) == 1:
        _LOG.warning(
            "multi_worker_mirrored trains with one worker, because no other workers are configured;"
            " give all workers the same runtime.worker_hosts (host:port of each, separated by"
            " commas) and each its own runtime.task_index, or set TF_CONFIG"
        )
    return strategy


def worker_count(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers that train together; 1 for all but multi-worker strategies."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    chiefs = jobs.get("chief", [])
    workers = jobs.get("worker", [])
    count = len(chiefs) + len(workers)
    return max(1, count)


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns the index of this process among the workers; 0 is the chief."""
    if worker_count(strategy) == 1:
        return 0

    # Chiefs come before the workers, which TensorFlow counts from 0 again.
    resolver = strategy.cluster_resolver
    index = int(resolver.task_id)
    if resolver.task_type == "worker":
        jobs = resolver.cluster_spec().as_dict()
        chiefs = jobs.get("chief", [])
        index += len(chiefs)
    return index


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the run's files."""
    return bool(strategy.extended.should_checkpoint)


def broadcast_text(strategy: tf.distribute.Strategy, text: str) -> str:
    """Returns the chief's `text` on every worker."""
    if worker_count(strategy) == 1:
        return text
    texts = all_gather(strategy, text)
    return texts[0]


def sum_over_workers(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the workers' values, on every worker.

    Runs in graph, in cross-replica context.
    """
    workers = worker_count(strategy)
    replicas = strategy.num_replicas_in_sync // workers

    # The first replica of each worker gives the value, and its others give zeros.
    def value_once() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group % replicas
        is_first = tf.equal(replica, 0)
        zeros = tf.zeros_like(value)
        return tf.where(is_first, value, zeros)

    values = strategy.run(value_once)
    return strategy.reduce("SUM", values, axis=None)


def broadcast_int(strategy: tf.distribute.Strategy, number: int) -> int:
    """Returns the chief's `number` on every worker."""
    # The other workers add zeros to the number of the chief.
    is_first = worker_index(strategy) == 0
    summand = np.array(number if is_first else 0)
    total = _sum_array(strategy, summand)
    return int(total)


def barrier(strategy: tf.distribute.Strategy) -> None:
    """Blocks until all workers have reached this call.

    Without it, a worker that exits first would interrupt the last sum of a slower worker.
    """
    if worker_count(strategy) > 1:
        broadcast_int(strategy, 0)
        time.sleep(_EXIT_DELAY)


def all_gather(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns the `text` of each worker, in the order of the workers, on every worker."""
    count = worker_count(strategy)
    index = worker_index(strategy)
    data = text.encode()
    length = len(data)

    lengths = np.zeros(count, np.int64)
    lengths[index] = length
    lengths = _sum_array(strategy, lengths)

    # Each worker fills its own row. The others add zeros to it.
    row_length = max(lengths)
    rows = np.zeros((count, row_length), np.int64)
    rows[index, :length] = np.frombuffer(data, np.uint8)
    rows = _sum_array(strategy, rows)
    byte_rows = rows.astype(np.uint8)

    texts = []
    for row, byte_count in zip(byte_rows, lengths, strict=True):
        text_bytes = row[:byte_count].tobytes()
        texts.append(text_bytes.decode())
    return texts


def _sum_array(strategy: tf.distribute.Strategy, value: np.ndarray) -> np.ndarray:
    if worker_count(strategy) == 1:
        return value
    sum_tensor = _build_sum_function(strategy)
    tensor = tf.constant(value, tf.int64)
    return sum_tensor(tensor).numpy()


@functools.cache
def _build_sum_function(strategy: tf.distribute.Strategy) -> Any:
    """Returns a function that is traced once, for all shapes."""
    return tf.function(
        functools.partial(sum_over_workers, strategy),
        input_signature=[tf.TensorSpec(None, tf.int64)],
        autograph=False,
    )
