"""The moving average of weights: closed form, exchange, replicas, all kinds of models."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import on_each_replica, replicas
from trainer_kit.checkpoints.state.variable_names import canonical_paths
from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.optimizers.moving_average import MovingAverage, exchange, select_averaged_variables


def compute_expected(values: list[float], config: EMAConfig) -> list[float]:
    """The averages after each of `values`, of which the first is the initial one."""
    average = values[0]
    averages = []
    for step, value in enumerate(values[1:], start=1):
        n = step - config.start_step
        limit = (1 + max(n, 0)) / (10 + max(n, 0)) if config.dynamic_decay else 1.0
        decay = 0.0 if n < 0 else min(config.average_decay, limit)
        average = decay * average + (1 - decay) * value
        averages.append(average)

    return averages


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("start", [0, 1, 4, 13])
def test_averages_follow_the_closed_form(start: int, dynamic: bool) -> None:
    decays = {"average": 0.6, "fast": 0.1, "slow": 0.95}
    config = EMAConfig(
        average_decay=0.6,
        start_step=start,
        dynamic_decay=dynamic,
        more_decays={"fast": 0.1, "slow": 0.95},
    )
    weights = keras.Variable(1.0, name="w")
    average = MovingAverage([weights], config)
    values = [1.0, *np.random.default_rng(0).normal(size=20)]
    step = tf.Variable(0, dtype=tf.int64)
    update = tf.function(lambda: average.update(step))
    measured = []

    for value in values[1:]:
        weights.assign(value)
        step.assign_add(1)
        update()
        averages = {"average": average.variables, **average.more_variables}
        measured.append([float(averages[name]["w"].numpy()) for name in decays])

    wanted = [
        compute_expected(values, config.replace(average_decay=decay)) for decay in decays.values()
    ]

    np.testing.assert_allclose(measured, np.transpose(wanted), rtol=1e-5, atol=1e-6)


def build_keras_model(library: Any = keras) -> Any:
    """A model with batch statistics."""
    model = library.Sequential(
        [library.layers.Dense(3), library.layers.BatchNormalization(), library.layers.Dense(1)]
    )
    model.build((None, 2))
    return model


class Module(tf.Module):
    """A model whose variables share a name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = tf.Variable([1.0, 2.0])
        self.b = tf.Variable([[3.0]])
        self.calls = tf.Variable(0, trainable=False)


def test_the_config_chooses_trainable_or_all_floating_variables() -> None:
    model = keras.Sequential([build_keras_model(), keras.layers.Dropout(0.5)])
    trainable = select_averaged_variables(model, EMAConfig())
    everything = select_averaged_variables(model, EMAConfig(trainable_weights_only=False))

    assert len(trainable) == 6
    assert len(everything) == 8
    assert {v.name for v in everything} - {v.name for v in trainable} == {
        "moving_mean",
        "moving_variance",
    }
    assert len(select_averaged_variables(Module(), EMAConfig(trainable_weights_only=False))) == 2


@pytest.mark.parametrize("kind", ["keras", "tf_keras", "module"])
def test_names_are_the_variables_paths_and_unique(kind: str) -> None:
    build_model = {
        "keras": lambda: build_keras_model(keras),
        "tf_keras": lambda: build_keras_model(tf_keras),
        "module": Module,
    }[kind]
    model = build_model()
    variables = select_averaged_variables(model, EMAConfig())

    average = MovingAverage(variables, EMAConfig())

    assert len(average.variables) == len(variables)

    for name, shadow in average.variables.items():
        assert isinstance(shadow, tf.Variable)
        assert ":" not in name

    if kind == "keras":
        assert list(average.variables) == canonical_paths([variable.path for variable in variables])


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_swapping_twice_restores_the_bits_on_every_replica(library: Any) -> None:
    strategy = replicas(2)
    config = EMAConfig(trainable_weights_only=False)
    with strategy.scope():
        model = build_keras_model(library)
        variables = select_averaged_variables(model, config)
        average = MovingAverage(variables, config)
        for seed, variable in enumerate(variables):
            variable.assign(tf.random.stateless_normal(variable.shape, [seed, 0]) * 1e3)

    shadows = list(average.variables.values())
    with strategy.scope():  # of another size: a sum and a difference would not give the bits back
        for seed, shadow in enumerate(shadows):
            shadow.assign(tf.random.stateless_normal(shadow.shape, [seed, 1]) / 7.0)

    weights_before = [on_each_replica(strategy, variable) for variable in variables]
    shadows_before = [on_each_replica(strategy, shadow) for shadow in shadows]

    average.swap()

    assert average.active_average

    for variable, shadow, weight, mean in zip(
        variables, shadows, weights_before, shadows_before, strict=True
    ):
        np.testing.assert_array_equal(on_each_replica(strategy, variable), mean)
        np.testing.assert_array_equal(on_each_replica(strategy, shadow), weight)
        assert not np.array_equal(weight, mean)

    average.swap()

    assert not average.active_average

    for variable, shadow, weight, mean in zip(
        variables, shadows, weights_before, shadows_before, strict=True
    ):
        np.testing.assert_array_equal(on_each_replica(strategy, variable), weight)
        np.testing.assert_array_equal(on_each_replica(strategy, shadow), mean)


@pytest.mark.parametrize("inside", [True, False], ids=["in a replica", "across replicas"])
def test_replicas_average_alike_wherever_update_is_called(inside: bool) -> None:
    strategy = replicas(2)
    config = EMAConfig(average_decay=0.5, dynamic_decay=False, more_decays={"fast": 0.25})
    with strategy.scope():
        weights = keras.Variable([2.0], name="w")
        average = MovingAverage([weights], config)
        weights.assign([4.0])

    @tf.function
    def step(count: tf.Tensor) -> None:
        if inside:
            strategy.run(lambda: average.update(count))
        else:
            average.update(count)

    for count in (1, 2):
        step(tf.constant(count))

    np.testing.assert_array_equal(on_each_replica(strategy, average.variables["w"]), [[3.5], [3.5]])
    np.testing.assert_array_equal(
        on_each_replica(strategy, average.more_variables["fast"]["w"]), [[3.875], [3.875]]
    )


def test_statistics_of_several_replicas_are_averaged() -> None:
    strategy = replicas(2)
    with strategy.scope():
        statistic = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
            name="statistic",
        )
        average = MovingAverage([statistic], EMAConfig(average_decay=0.5, dynamic_decay=False))

    strategy.run(
        lambda: statistic.assign(
            tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        )
    )
    average.update(1)

    assert on_each_replica(strategy, average.variables["statistic"]) == [0.25, 0.25]

    average.swap()

    assert on_each_replica(strategy, statistic) == [0.25, 0.25]

    average.swap()

    assert on_each_replica(strategy, statistic) == [0.0, 1.0]


def test_one_of_several_averages_is_reset_or_swapped_alone() -> None:
    weights = keras.Variable([1.0], name="w")
    average = MovingAverage([weights], EMAConfig(more_decays={"fast": 0.5}))
    weights.assign([5.0])

    average.reset(["fast"])

    assert average.variables["w"].numpy() == 1.0
    assert average.more_variables["fast"]["w"].numpy() == 5.0

    weights.assign([7.0])

    average.swap("fast")

    assert average.active_average == "fast"
    assert weights.numpy() == 5.0

    average.swap("fast")

    assert average.active_average == ""
    assert weights.numpy() == 7.0


def test_a_new_run_averages_from_the_loaded_weights() -> None:
    weights = keras.Variable(1.0, name="w")
    average = MovingAverage([weights], EMAConfig())
    weights.assign(5.0)  # by task.initialize

    average.initialize()

    assert float(average.variables["w"].numpy()) == 5.0
    assert average.section == "average"


def test_variables_are_exchanged_one_by_one_on_every_replica() -> None:
    strategy = replicas(4)
    with strategy.scope():
        ones, others = (
            [tf.Variable(tf.fill([2], number * sign)) for number in (1e-30, 3.0)]
            for sign in (1.0, -7.0)
        )

    before = [[variable.numpy() for variable in values] for values in (ones, others)]

    tf.function(lambda: exchange(strategy, ones, others))()

    for values, compute_expected in zip((others, ones), before, strict=True):
        for variable, value in zip(values, compute_expected, strict=True):
            assert [local.numpy().tolist() for local in variable.values] == [value.tolist()] * 4
