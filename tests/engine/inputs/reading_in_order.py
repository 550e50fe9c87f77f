"""Data with parallel random numbers, read under op determinism, in a separate process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.inputs.dataset_resume import skip_batches
from trainer_kit.inputs.sources.source_protocol import call_build_inputs


def _draw(value: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform([], 0, 10**6, tf.int64)


def _make(params: Any) -> tf.data.Dataset:
    data = tf.data.Dataset.range(40).map(_draw, num_parallel_calls=4, deterministic=False)
    more = tf.data.Dataset.range(9).interleave(
        lambda value: tf.data.Dataset.range(5).map(_draw), num_parallel_calls=4, deterministic=False
    )
    return tf.data.Dataset.zip(data.cache().shuffle(9).repeat(), more.repeat()).batch(4)


def _read(data: tf.data.Dataset, count: int) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in data.take(count).as_numpy_iterator()]


def read_whole_and_skipped() -> None:
    """Fails unless what is read after skipping is what follows when nothing is skipped."""
    tf.random.set_seed(3)
    tf.config.experimental.enable_op_determinism()
    whole = _read(call_build_inputs(_make, None), 30)
    tf.random.uniform([])
    for cut in (1, 9, 13, 22):
        assert _read(skip_batches(call_build_inputs(_make, None), cut), 30 - cut) == whole[cut:], (
            cut
        )
    assert len({value for batch in whole for value in batch[1]}) > 100
