"""Functions in graph that tell when they are traced again."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from trainer_kit.training.loops.loop_function import LoopFunction


def test_eager_functions_run_their_python_at_each_call() -> None:
    calls = []
    loop = LoopFunction(
        lambda iterator: calls.append(next(iterator)) or tf.constant(1), "the training loop"
    )
    iterator = _create_iterator(2)

    for _ in range(2):
        loop(iterator)

    assert len(calls) == 1

    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(2):
            loop(iterator)
    finally:
        tf.config.run_functions_eagerly(False)

    assert len(calls) == 3


def _create_iterator(batch: int) -> object:
    return iter(tf.data.Dataset.range(8).map(lambda x: (x, 1.0)).batch(batch, drop_remainder=True))


def test_another_shape_of_batch_is_told_with_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = LoopFunction(lambda iterator, number: next(iterator)[0][0] + number, "the training loop")
    first = _create_iterator(2)

    loop.trace_graph(first, tf.constant(1, tf.int64))

    with caplog.at_level(logging.WARNING):
        for iterator in (first, _create_iterator(2)):
            assert int(loop(iterator, tf.constant(1, tf.int64))) == 1
        assert caplog.text == ""
        assert int(loop(_create_iterator(4), tf.constant(2, tf.int64))) == 2

    assert "the training loop is traced again" in caplog.text
    assert (
        "its batches are now int64(4,), float32(4,), and were int64(2,), float32(2,) before;"
        in caplog.text
    )


def test_another_kind_of_iterator_gets_a_graph_of_its_own() -> None:
    loop = LoopFunction(lambda iterator: next(iterator)[0][0], "the training loop")
    dataset = tf.data.Dataset.range(8).map(lambda x: (x, 1.0)).batch(2, drop_remainder=True)
    spread = tf.distribute.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(dataset)
    iterators = [iter(data) for data in (dataset, spread, dataset)]

    assert iterators[0].element_spec == iterators[1].element_spec
    assert [int(loop(iterator)) for iterator in iterators * 2] == [0, 0, 0, 2, 2, 2]
