"""A seed for each example, from the data's seed, the epoch and the index of the example.

The seeds are a pure function of these. They do not depend on the place of an example in a batch,
nor on the number of replicas, workers or threads. The hash is SplitMix64 (G. Steele, D. Lea, C.
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): each stage adds a multiple of
the golden ratio and mixes all 64 bits. Its last stage is a bijection, so no two examples of one
epoch get the same seed.
"""

from __future__ import annotations

import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
# For each round: shift right, xor, multiply.
_ROUNDS = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
    (31, 1),
)


def epoch_key(seed: int | None, epoch: tf.Tensor) -> tf.Tensor:
    """Returns the state of the hash for one epoch, a uint64 scalar.

    Runs eagerly or in graph, on the host.

    Args:
      seed: The seed of the data. None counts as 0, as it does for the order.
      epoch: The epoch, an int64 scalar, from 0 on.
    """
    data_seed = (seed or 0) % 2**64
    first_state = tf.constant(data_seed, tf.uint64)
    state = _mix(first_state)
    state += _GOLDEN * tf.cast(epoch, tf.uint64)
    return _mix(state)


def example_seeds(key: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """Returns the seeds of examples, int32 [n, 2].

    `tf.random.stateless_uniform` takes each row as its seed. Runs eagerly or in graph, on the host.

    Args:
      key: The key of the epoch, by `epoch_key`.
      indices: The indices of the examples in the data, int64 [n].
    """
    numbers = tf.cast(indices, tf.uint64)
    states = key + _GOLDEN * numbers
    hashes = _mix(states)
    return tf.bitcast(hashes, tf.int32)


def _mix(state: tf.Tensor) -> tf.Tensor:
    """Returns the next output of SplitMix64 from each state, uint64.

    Sums and products are taken modulo 2**64.
    """
    state += _GOLDEN
    for shift, factor in _ROUNDS:
        bits = tf.constant(shift, tf.uint64)
        shifted = tf.bitwise.right_shift(state, bits)
        state = tf.bitwise.bitwise_xor(state, shifted)
        if factor > 1:
            state *= factor
    return state
