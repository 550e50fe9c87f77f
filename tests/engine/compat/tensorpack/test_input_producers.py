"""The producer of indices of TensorFlow 1, and the queues that the door refuses."""

from __future__ import annotations

import pytest

from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.errors import UsageError


def test_a_producer_counts_the_indices_of_each_pass() -> None:
    index = tf.train.range_input_producer(3, shuffle=False).dequeue()
    session = tf.Session()

    indices = [int(session.run(index)) for _ in range(5)]

    assert indices == [0, 1, 2, 0, 1]


def test_a_shuffled_pass_has_each_index_once() -> None:
    index = tf.train.range_input_producer(20, seed=3).dequeue()
    session = tf.Session()

    first = [int(session.run(index)) for _ in range(20)]
    second = [int(session.run(index)) for _ in range(20)]

    assert sorted(first) == list(range(20))
    assert sorted(second) == list(range(20))
    assert first != second


def test_other_queues_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tf\.FIFOQueue begins a queue"):
        _ = tf.FIFOQueue
    with pytest.raises(UsageError, match=r"tf\.train\.shuffle_batch begins a queue"):
        _ = tf.train.shuffle_batch
    with pytest.raises(UsageError, match="leave num_epochs out"):
        tf.train.range_input_producer(3, num_epochs=1)
