"""The private names of Keras 3 and tf_keras: that they are there, and what happens without them."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.builders import replicas
from trainer_kit.runtime import keras_internals as internals


def test_keras_draws_from_the_generator_that_was_set() -> None:
    keras.utils.set_random_seed(1)

    assert internals.get_global_seed_generator() is None

    mine = keras.random.SeedGenerator(7)

    internals.set_global_seed_generator(mine)

    assert internals.get_global_seed_generator() is mine

    before = mine.state.numpy().tolist()

    keras.random.uniform(())

    assert mine.state.numpy().tolist() != before

    keras.utils.set_random_seed(1)

    keras.random.uniform(())

    assert isinstance(internals.get_global_seed_generator(), keras.random.SeedGenerator)


def test_a_missing_seed_generator_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keras.random.SeedGenerator(7)
    state = importlib.import_module("keras.src.backend.common.global_state")

    monkeypatch.delattr(state, "get_global_attribute")
    monkeypatch.delattr(state, "set_global_attribute")

    assert internals.get_global_seed_generator() is None

    internals.set_global_seed_generator(mine)

    assert "after a resume, keras.random functions without a seed draw other numbers" in caplog.text


def test_each_model_has_the_layer_numbers_of_the_first() -> None:
    keras.utils.clear_session()

    keras.layers.Dense(1)  # such as one that a task has made before

    for _ in range(2):
        with internals.LayerNumbering.restart():
            assert keras.layers.Dense(1).name == "dense_1"

    assert keras.layers.Dense(1).name == "dense_2"

    keras.utils.clear_session()

    with internals.LayerNumbering.restart():
        assert keras.layers.Dense(1).name == "dense"


# ---- callbacks


def test_a_tensorboard_tells_whether_it_traces_batches() -> None:
    assert internals.should_trace_batches(keras.callbacks.TensorBoard(profile_batch=2))
    assert not internals.should_trace_batches(keras.callbacks.TensorBoard())
    assert not internals.should_trace_batches(object())


def test_a_comparison_is_chosen_once() -> None:
    callback = keras.callbacks.EarlyStopping("loss", min_delta=0.5)
    callback.set_model(keras.Sequential())
    for _ in range(2):
        internals.set_monitor_op(callback)
        assert callback.min_delta == -0.5
        assert callback.monitor_op is not None

    internals.set_monitor_op(object())


def test_a_loss_is_undivided_in_its_context_only() -> None:
    loss = keras.losses.MeanSquaredError()
    zeros = tf.zeros([2, 1])

    def losses() -> list[Any]:
        with internals.skip_replica_loss_scaling():
            undivided = loss(zeros, zeros + 2)
        return [undivided, loss(zeros, zeros + 2)]

    strategy = replicas(2)
    undivided, divided = map(strategy.experimental_local_results, strategy.run(tf.function(losses)))

    assert [float(loss) for loss in undivided] == [4, 4]
    assert [float(loss) for loss in divided] == [2, 2]


def test_variables_get_the_paths_that_are_given() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

    internals.set_variable_paths(model, ["outer/dense/kernel", "outer/dense/bias"])

    assert [variable.path for variable in model.variables] == [
        "outer/dense/kernel",
        "outer/dense/bias",
    ]
    with pytest.raises(ValueError, match="shorter"):
        internals.set_variable_paths(model, ["kernel"])
