"""The private names of Keras 3 and tf_keras: that they are there, and what happens without them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from trainer_kit.distribution import keras_internals as internals


def test_keras_draws_from_the_generator_that_was_set() -> None:
    keras.utils.set_random_seed(1)
    assert internals.global_seed_generator() is None
    mine = keras.random.SeedGenerator(7)
    internals.set_global_seed_generator(mine)
    assert internals.global_seed_generator() is mine
    before = mine.state.numpy().tolist()
    keras.random.uniform(())
    assert mine.state.numpy().tolist() != before


def test_keras_shows_the_generator_that_it_made() -> None:
    keras.utils.set_random_seed(1)
    keras.random.uniform(())
    assert isinstance(internals.global_seed_generator(), keras.random.SeedGenerator)


def test_a_missing_seed_generator_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keras.random.SeedGenerator(7)
    state = importlib.import_module("keras.src.backend.common.global_state")
    monkeypatch.delattr(state, "get_global_attribute")
    monkeypatch.delattr(state, "set_global_attribute")
    assert internals.global_seed_generator() is None
    internals.set_global_seed_generator(mine)
    assert "after a resume, keras.random functions without a seed draw other numbers" in caplog.text


def _schedule() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.CosineDecay(0.1, 10)


def test_an_optimizer_shows_its_variable_or_its_schedule() -> None:
    schedule = _schedule()
    assert internals.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    constant = keras.optimizers.SGD(0.5)
    assert internals.learning_rate_of(constant) is constant.learning_rate
    assert internals.learning_rate_of(SimpleNamespace(learning_rate=2.0)) == 2.0
    assert internals.learning_rate_of(object()) is None


def test_a_replaced_rate_keeps_the_old_variable() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([keras.Variable(1.0)])
    before = [variable.path for variable in optimizer.variables]
    assert internals.replace_learning_rate(optimizer, _schedule())
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert [variable.path for variable in optimizer.variables] == before


class _NoRate:
    """An optimizer of a Keras that has its rate elsewhere."""

    def __init__(self) -> None:
        self.iterations = tf.Variable(0)

    @property
    def learning_rate(self) -> float:
        return 0.25


def test_without_the_name_the_public_rate_is_returned() -> None:
    optimizer = _NoRate()
    assert internals.learning_rate_of(optimizer) == 0.25
    assert not internals.replace_learning_rate(optimizer, _schedule())
    assert optimizer.learning_rate == 0.25


def test_a_variable_is_known_by_its_position_in_the_optimizer() -> None:
    one, two = keras.Variable(1.0), tf.Variable(2.0)
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([one, two])
    found = [internals.variable_index(optimizer, variable) for variable in (one, one.value, two)]
    assert found == [0, 0, 1]


def test_an_optimizer_tells_which_variables_keras_decays() -> None:
    one, two = keras.Variable(1.0, name="one"), keras.Variable(2.0, name="two")
    optimizer = keras.optimizers.AdamW(0.5)
    optimizer.exclude_from_weight_decay(var_names=["two"])
    assert [internals.keras_decays(optimizer, variable) for variable in (one, two)] == [True, False]
    assert internals.keras_decays(object(), one)  # type: ignore[arg-type]
