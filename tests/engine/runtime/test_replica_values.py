from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.runtime.replica_values import (
    ReplicasState,
    are_alike,
    encode_array,
    own_to_each_replica,
    put_replica_values,
    replica_values,
)


def two_replicas() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def variable_of(strategy: tf.distribute.Strategy, *, trainable: bool = False) -> tf.Variable:
    """One that each replica may set to a value of its own, as Keras 3 makes the averages of batch normalization."""
    with strategy.scope():
        return tf.Variable([0.0, 0.0], trainable=trainable)


def move_apart(variable: tf.Variable, strategy: tf.distribute.Strategy) -> None:
    for number, part in enumerate(strategy.experimental_local_results(variable)):
        part.assign([0.1 + number, float("nan")])


def bits(variable: tf.Variable, strategy: tf.distribute.Strategy) -> list[bytes]:
    return [part.numpy().tobytes() for part in strategy.experimental_local_results(variable)]


def as_earlier_versions_saved(state: list[Any]) -> list[Any]:
    return json.loads(json.dumps(state, default=encode_array))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", [list, as_earlier_versions_saved])
def test_each_replica_gets_back_its_own_bits(form: Callable[[list[Any]], list[Any]]) -> None:
    strategy = two_replicas()
    first, second = variable_of(strategy), variable_of(strategy)
    move_apart(first, strategy)
    values = replica_values([first], strategy)
    assert not are_alike(values)
    state = form(values)
    assert put_replica_values([second], strategy, state)
    assert bits(second, strategy) == bits(first, strategy)
    assert len(set(bits(second, strategy))) == 2


def test_replicas_with_the_same_values_are_alike() -> None:
    strategy = two_replicas()
    assert are_alike(replica_values([variable_of(strategy)], strategy))
    assert are_alike([])


def test_values_of_other_replicas_or_variables_change_nothing() -> None:
    strategy, alone = two_replicas(), tf.distribute.OneDeviceStrategy("CPU:0")
    first, single = variable_of(strategy), variable_of(alone)
    move_apart(first, strategy)
    state = replica_values([first], strategy)
    before = bits(single, alone)
    assert not put_replica_values([single], alone, state)
    assert not put_replica_values([single], alone, [*state, *state])
    assert bits(single, alone) == before


def test_only_what_a_step_may_set_apart_is_own_to_each_replica() -> None:
    strategy, alone = two_replicas(), tf.distribute.OneDeviceStrategy("CPU:0")
    weight, average = variable_of(strategy, trainable=True), variable_of(strategy)
    assert [one is average for one in own_to_each_replica([weight, average], strategy)] == [True]
    assert own_to_each_replica([variable_of(alone)], alone) == []


@pytest.mark.parametrize("form", [list, as_earlier_versions_saved])
def test_numbers_of_16_bits_come_back_through_json(form: Callable[[list[Any]], list[Any]]) -> None:
    strategy = two_replicas()
    with strategy.scope():
        variable = tf.Variable(tf.constant([0.5, 3.0], tf.bfloat16), trainable=False)
    state = form(replica_values([variable], strategy))
    variable.assign(tf.zeros_like(variable))
    assert put_replica_values([variable], strategy, state)
    assert variable.numpy().tolist() == [0.5, 3.0]


def test_replicas_share_moving_averages_until_they_are_put_back() -> None:
    strategy = two_replicas()
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "trainable": False}
    with strategy.scope():
        first_replicas = tf.Variable(0.0, trainable=False)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN, **on_read)
        metric = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, **on_read)
        counter = tf.Variable(0, trainable=False)
    variables = [first_replicas, mean, metric, counter]

    def values() -> list[list[float]]:
        return [[float(part) for part in strategy.experimental_local_results(variable)] for variable in variables]

    for variable in variables:
        for part, value in zip(strategy.experimental_local_results(variable), (1, 4), strict=True):
            part.assign(tf.cast(value, part.dtype))
    shared = ReplicasState(lambda: variables, strategy)
    for _ in range(2):
        shared.share()
        assert values() == [[1, 1], [2.5, 2.5], [1, 4], [1, 4]]
    for _ in range(2):
        shared.put_back()
        assert values() == [[1, 4]] * 4
