"""Arrays in batches, from any position on."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.data.array_epochs import ArrayEpochs


def values(batch: Any) -> list[Any]:
    """Returns the parts of a batch as dense arrays."""
    sparse, ragged, dense = batch
    return [tf.sparse.to_dense(sparse).numpy(), ragged.to_tensor(shape=[None, 3]).numpy(), dense.numpy()]


def test_sparse_and_ragged_arrays_go_on_at_a_position() -> None:
    tf.random.set_seed(1)
    dense = np.arange(1, 22).reshape(7, 3) * (np.random.RandomState(0).rand(7, 3) > 0.5)
    ragged = tf.ragged.stack([row[: 1 + number % 3] for number, row in enumerate(dense)])
    source = ArrayEpochs((tf.sparse.from_dense(dense), ragged, tf.constant(dense)), 2, shuffle=True)
    batches = [values(one) for one in source.at(0).take(8)]
    assert [len(one[2]) for one in batches] == [2, 2, 2, 1] * 2
    assert sorted(np.concatenate([one[2] for one in batches[:4]]).tolist()) == sorted(dense.tolist())
    for sparse, _, same in batches:
        np.testing.assert_array_equal(sparse, same)
    for position in (1, 6):
        for found, expected in zip(source.at(position).take(2), batches[position:], strict=False):
            for one, other in zip(values(found), expected, strict=True):
                np.testing.assert_array_equal(one, other)
