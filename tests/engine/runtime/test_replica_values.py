from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import on_each_replica, replicas
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.replica_values import (
    ReplicaLocalState,
    are_replicas_equal,
    build_run_options,
    encode_array,
    local_tensors,
    read_replica_values,
    restore_replica_values,
    select_replica_local,
)


def create_variable(strategy: tf.distribute.Strategy, *, trainable: bool = False) -> tf.Variable:
    """Returns a variable that each replica may set, such as an average of batch normalization."""
    with strategy.scope():
        return tf.Variable([0.0, 0.0], trainable=trainable)


def move_apart(variable: tf.Variable, strategy: tf.distribute.Strategy) -> None:
    for number, part in enumerate(strategy.experimental_local_results(variable)):
        part.assign([0.1 + number, float("nan")])


def encode_as_earlier_versions(state: list[Any]) -> list[Any]:
    return json.loads(json.dumps(state, default=encode_array))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [list, encode_as_earlier_versions])
def test_each_replica_gets_back_its_own_bits(form: Callable[[list[Any]], list[Any]]) -> None:
    strategy = replicas(2)
    first = create_variable(strategy)
    second = create_variable(strategy)

    move_apart(first, strategy)
    values = read_replica_values([first], strategy)

    assert not are_replicas_equal(values)

    assert restore_replica_values([second], strategy, form(values))

    copies = on_each_replica(strategy, second)
    np.testing.assert_array_equal(copies, on_each_replica(strategy, first))
    assert [float(copy[0]) for copy in copies] == pytest.approx([0.1, 1.1])


def test_replicas_with_the_same_values_are_alike() -> None:
    strategy = replicas(2)

    assert are_replicas_equal(read_replica_values([create_variable(strategy)], strategy))
    assert are_replicas_equal([])


def test_values_of_other_replicas_or_variables_change_nothing() -> None:
    strategy = replicas(2)
    alone = tf.distribute.OneDeviceStrategy("CPU:0")
    first = create_variable(strategy)
    single = create_variable(alone)

    move_apart(first, strategy)
    state = read_replica_values([first], strategy)

    assert not restore_replica_values([single], alone, state)
    assert not restore_replica_values([single], alone, [*state, *state])
    assert on_each_replica(alone, single)[0].tolist() == [0.0, 0.0]


def test_only_what_a_step_may_set_apart_is_own_to_each_replica() -> None:
    strategy = replicas(2)
    alone = tf.distribute.OneDeviceStrategy("CPU:0")
    weight = create_variable(strategy, trainable=True)
    average = create_variable(strategy)

    (selected,) = select_replica_local([weight, average], strategy)

    assert selected is average
    assert select_replica_local([create_variable(alone)], alone) == []


@pytest.mark.parametrize("form", [list, encode_as_earlier_versions])
def test_numbers_of_16_bits_come_back_through_json(form: Callable[[list[Any]], list[Any]]) -> None:
    strategy = replicas(2)
    with strategy.scope():
        variable = tf.Variable(tf.constant([0.5, 3.0], tf.bfloat16), trainable=False)

    state = form(read_replica_values([variable], strategy))
    variable.assign(tf.zeros_like(variable))

    assert restore_replica_values([variable], strategy, state)
    assert variable.numpy().tolist() == [0.5, 3.0]


def test_replicas_share_moving_averages_until_they_are_put_back() -> None:
    strategy = replicas(2)
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "trainable": False}
    with strategy.scope():
        first_replicas = tf.Variable(0.0, trainable=False)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN, **on_read)
        metric = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, **on_read)
        counter = tf.Variable(0, trainable=False)

    variables = [first_replicas, mean, metric, counter]

    def values() -> list[list[float]]:
        return [
            [float(part) for part in strategy.experimental_local_results(variable)]
            for variable in variables
        ]

    for variable in variables:
        for part, value in zip(strategy.experimental_local_results(variable), (1, 4), strict=True):
            part.assign(tf.cast(value, part.dtype))

    shared = ReplicaLocalState(lambda: variables, strategy)
    for _ in range(2):
        shared.share_values()
        assert values() == [[1, 1], [2.5, 2.5], [1, 4], [1, 4]]

    for _ in range(2):
        shared.unshare_values()
        assert values() == [[1, 4]] * 4


def test_one_replica_has_the_tensors_of_its_batch() -> None:
    batch = {"a": tf.constant([1]), "b": (tf.constant([2]), "no tensor")}
    assert [tensor.numpy().tolist() for tensor in local_tensors(batch, replicas(1))] == [[1], [2]]


def test_local_tensors_include_all_replicas_and_sparse_parts() -> None:
    strategy = replicas(2)
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))))

    assert [tensor.numpy().tolist() for tensor in local_tensors(batch, strategy)] == [
        [0, 1],
        [2, 3],
    ]
    assert len(local_tensors(tf.sparse.eye(2), replicas(1))) == 3


def test_there_are_options_only_when_the_config_asks_for_them() -> None:
    assert build_run_options(RuntimeConfig()) is None

    for wanted in (True, False):
        options = build_run_options(RuntimeConfig(tpu_enable_xla_dynamic_padder=wanted))
        assert options is not None
        assert options.experimental_xla_options.enable_xla_dynamic_padder is wanted
