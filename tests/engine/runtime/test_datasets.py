"""Datasets over replicas: functions and datasets, with ragged last batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import input_context, read_batches, replicas
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.datasets import (
    distribute_dataset,
    drop_partial_steps,
    with_private_threadpool,
)

EXAMPLES = 11


def one_cpu() -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy("CPU:0")


def read_shares(strategy: tf.distribute.Strategy, dataset: Any) -> list[list[list[int]]]:
    """Returns the values of each replica, for each step."""
    return [
        [share.numpy().tolist() for share in strategy.experimental_local_results(step)]
        for step in dataset
    ]


def read(
    size: int, start: int = 0, input_context: tf.distribute.InputContext | None = None
) -> tf.data.Dataset:
    assert input_context is not None
    batch = input_context.get_per_replica_batch_size(size)
    return tf.data.Dataset.range(start, start + EXAMPLES).batch(batch)


@pytest.mark.parametrize(("count", "made_by_a_function"), [(2, False), (4, True)])
def test_global_batches_are_split_without_losing_examples(
    count: int, made_by_a_function: bool
) -> None:
    strategy = replicas(count)
    if made_by_a_function:
        distributed = distribute_dataset(strategy, read, 4)
    else:
        distributed = distribute_dataset(strategy, tf.data.Dataset.range(EXAMPLES).batch(4))

    batches = read_shares(strategy, distributed)

    assert [len(share) for share in batches[0]] == [4 // count] * count
    assert len(batches) == 3
    assert [value for step in batches for share in step for value in share] == list(range(EXAMPLES))


class Reader:
    """Has a method that takes the context."""

    def read(self, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        return read(4, input_context=input_context)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            lambda size, *, start: tf.data.Dataset.range(start, start + 4).batch(size),
            {"size": 2, "start": 0},
        ),
        (Reader().read, {}),
        (functools.partial(read, 4), {}),
    ],
    ids=["a function without the context", "a method", "a partial"],
)
def test_a_function_gets_its_arguments_and_a_context_it_takes(
    function: Callable[..., Any], arguments: dict[str, int]
) -> None:
    strategy = replicas(2)

    distributed = distribute_dataset(strategy, function, **arguments)

    assert read_shares(strategy, distributed)[0] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("make_strategy", [lambda: None, tf.distribute.get_strategy, one_cpu])
def test_one_device_gets_the_plain_dataset(
    make_strategy: Callable[[], tf.distribute.Strategy | None],
) -> None:
    strategy = make_strategy()
    dataset = tf.data.Dataset.range(EXAMPLES).batch(4)

    assert distribute_dataset(strategy, dataset) is dataset

    distributed = distribute_dataset(strategy, read, 4, start=2)
    assert isinstance(distributed, tf.data.Dataset)
    assert read_batches(distributed) == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]


def test_input_options_reach_the_strategy_and_not_the_function() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # which the options change
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
    )

    def make(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        return (
            tf.data.Dataset.range(2)
            .map(lambda value: value + 10 * input_context.input_pipeline_id)
            .batch(1)
        )

    batches = read_shares(strategy, distribute_dataset(strategy, make, input_options=options))

    # A pipeline for each replica, as the options ask for.
    assert batches == [[[0], [10]], [[1], [11]]]


@pytest.mark.parametrize("make_strategy", [lambda: replicas(1), lambda: replicas(2)])
def test_what_is_no_dataset_is_named(make_strategy: Callable[[], tf.distribute.Strategy]) -> None:
    strategy = make_strategy()

    def forgets_to_return(input_context: tf.distribute.InputContext) -> None:
        del input_context

    for data in ([1, 2], forgets_to_return):
        with pytest.raises(TypeError):
            distribute_dataset(strategy, data)


def test_a_private_thread_pool_is_an_option_of_the_dataset() -> None:
    dataset = tf.data.Dataset.range(3).batch(2)

    assert with_private_threadpool(dataset, RuntimeConfig()) is dataset

    own = with_private_threadpool(dataset, RuntimeConfig(dataset_num_private_threads=3))
    assert own.options().threading.private_threadpool_size == 3
    assert np.array_equal(np.concatenate(list(own.as_numpy_iterator())), [0, 1, 2])


@pytest.mark.parametrize("form", ["one tensor", "a tuple of one", "a dict in a pair"])
def test_full_batches_end_when_a_replica_would_get_none(form: str) -> None:
    def make(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        shaped: dict[str, Callable[[Any], Any]] = {
            "one tensor": lambda x: x,
            "a tuple of one": lambda x: (x,),
            "a dict in a pair": lambda x: ({"x": x, "y": {"z": x}}, x + 1),
        }
        dataset = tf.data.Dataset.range(EXAMPLES).batch(2, drop_remainder=True).map(shaped[form])
        whole = drop_partial_steps(dataset, input_context)
        assert whole.element_spec == dataset.element_spec
        assert whole.cardinality() == 4
        return whole.map(lambda *parts: tf.nest.flatten(parts)[0])

    strategy = replicas(2)

    assert read_shares(strategy, distribute_dataset(strategy, make)) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


def test_one_replica_or_ragged_batches_keep_every_batch() -> None:
    full = tf.data.Dataset.range(EXAMPLES).batch(4, drop_remainder=True)
    ragged = tf.data.Dataset.range(EXAMPLES).batch(4)
    several = input_context(4, 2)
    one_each = input_context(2, 2)

    assert drop_partial_steps(full, None) is full
    assert drop_partial_steps(full, one_each) is full
    assert drop_partial_steps(ragged, several) is ragged
    assert drop_partial_steps(full, several) is not full
    assert drop_partial_steps(full.repeat(), several).cardinality() == tf.data.INFINITE_CARDINALITY
