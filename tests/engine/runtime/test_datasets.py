"""Datasets over replicas: functions and datasets, with ragged last batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.datasets import distribute_dataset, whole_steps, with_threads

EXAMPLES = 11


def mirrored(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def one_cpu() -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy("CPU:0")


def shares(strategy: tf.distribute.Strategy, dataset: Any) -> list[list[list[int]]]:
    """The values of each replica, for each step."""
    return [[share.numpy().tolist() for share in strategy.experimental_local_results(step)] for step in dataset]


def examples(shares_of_steps: list[list[list[int]]]) -> list[int]:
    return [value for step in shares_of_steps for share in step for value in share]


def read(size: int, start: int = 0, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    assert input_context is not None
    batch = input_context.get_per_replica_batch_size(size)
    return tf.data.Dataset.range(start, start + EXAMPLES).batch(batch)


@pytest.mark.parametrize("replicas", [2, 4])
def test_global_batches_are_split_without_losing_examples(replicas: int) -> None:
    strategy = mirrored(replicas)
    seen = shares(strategy, distribute_dataset(strategy, tf.data.Dataset.range(EXAMPLES).batch(4)))
    assert [len(share) for share in seen[0]] == [4 // replicas] * replicas
    assert len(seen) == 3
    assert examples(seen) == list(range(EXAMPLES))


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_dataset_function_gets_the_input_context(replicas: int) -> None:
    strategy = mirrored(replicas)
    seen = shares(strategy, distribute_dataset(strategy, read, 4, start=100))
    assert [len(share) for share in seen[0]] == [4 // replicas] * replicas
    assert len(seen) == 3
    assert examples(seen) == list(range(100, 100 + EXAMPLES))


def test_a_function_without_context_gets_only_its_own_arguments() -> None:
    strategy = mirrored(2)
    received = []

    def make(size: int, *, start: int) -> tf.data.Dataset:
        received.append((size, start))
        return tf.data.Dataset.range(start, start + 4).batch(size)

    assert shares(strategy, distribute_dataset(strategy, make, 2, start=5)) == [[[5, 6], [7, 8]]]
    assert received == [(2, 5)]


def test_methods_and_partials_get_the_context_too() -> None:
    class Reader:
        def read(self, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
            return tf.data.Dataset.range(4).batch(input_context.get_per_replica_batch_size(4))

    strategy = mirrored(2)
    for function in (Reader().read, functools.partial(read, 4)):
        assert shares(strategy, distribute_dataset(strategy, function))[0] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("make_strategy", [lambda: None, tf.distribute.get_strategy, one_cpu])
def test_one_device_gets_the_plain_dataset(make_strategy: Callable[[], tf.distribute.Strategy | None]) -> None:
    strategy = make_strategy()
    dataset = tf.data.Dataset.range(EXAMPLES).batch(4)
    assert distribute_dataset(strategy, dataset) is dataset
    made = distribute_dataset(strategy, read, 4, start=2)
    assert isinstance(made, tf.data.Dataset)
    assert [batch.tolist() for batch in made.as_numpy_iterator()] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]


def test_the_plain_dataset_trains_under_one_device() -> None:
    strategy = one_cpu()
    batches = [strategy.run(tf.reduce_sum, (batch,)).numpy() for batch in distribute_dataset(strategy, read, 4)]
    assert batches == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 10]


def test_input_options_reach_the_strategy_and_not_the_function() -> None:
    strategy = mirrored(2)
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
    )

    def make(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(2).map(lambda value: value + 10 * input_context.input_pipeline_id).batch(1)

    seen = shares(strategy, distribute_dataset(strategy, make, input_options=options))
    assert seen == [[[0], [10]], [[1], [11]]]  # a pipeline for each replica, as the options ask for


@pytest.mark.parametrize("make_strategy", [tf.distribute.get_strategy, lambda: mirrored(2)])
def test_what_is_no_dataset_is_named(make_strategy: Callable[[], tf.distribute.Strategy]) -> None:
    strategy = make_strategy()

    def forgets_to_return(input_context: tf.distribute.InputContext) -> None:
        del input_context

    with pytest.raises(TypeError, match="a list cannot be distributed"):
        distribute_dataset(strategy, [1, 2])
    with pytest.raises(TypeError, match="forgets_to_return returned a NoneType"):
        distribute_dataset(strategy, forgets_to_return)


def test_a_private_thread_pool_is_an_option_of_the_dataset() -> None:
    dataset = tf.data.Dataset.range(3).batch(2)
    assert with_threads(dataset, RuntimeConfig()) is dataset
    own = with_threads(dataset, RuntimeConfig(dataset_num_private_threads=3))
    assert own.options().threading.private_threadpool_size == 3
    assert np.array_equal(np.concatenate(list(own.as_numpy_iterator())), [0, 1, 2])


@pytest.mark.parametrize("form", ["one tensor", "a tuple of one", "a pair", "a dict in a pair"])
def test_full_batches_end_when_a_replica_would_get_none(form: str) -> None:
    def make(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        shaped: dict[str, Callable[[Any], Any]] = {
            "one tensor": lambda x: x,
            "a tuple of one": lambda x: (x,),
            "a pair": lambda x: (x, x + 1),
            "a dict in a pair": lambda x: ({"x": x, "y": {"z": x}}, x + 1),
        }
        dataset = tf.data.Dataset.range(EXAMPLES).batch(2, drop_remainder=True).map(shaped[form])
        whole = whole_steps(dataset, input_context)
        assert whole.element_spec == dataset.element_spec
        assert whole.cardinality() == 4
        return whole.map(lambda *parts: tf.nest.flatten(parts)[0])

    strategy = mirrored(2)
    assert shares(strategy, distribute_dataset(strategy, make)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_one_replica_or_ragged_batches_keep_every_batch() -> None:
    full, ragged = (tf.data.Dataset.range(EXAMPLES).batch(4, drop_remainder=drop) for drop in (True, False))
    several = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=0, num_replicas_in_sync=4)
    one_each = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=0, num_replicas_in_sync=2)
    assert whole_steps(full, None) is full
    assert whole_steps(full, one_each) is full
    assert whole_steps(ragged, several) is ragged
    assert whole_steps(full, several) is not full
    assert whole_steps(full.repeat(), several).cardinality() == tf.data.INFINITE_CARDINALITY
