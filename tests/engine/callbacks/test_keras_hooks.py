"""A callback of Keras acts on batches if it has a method for them that does something."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tf_keras

from trainer_kit.callbacks.keras_hooks import TEST_BATCHES, TRAIN_BATCHES, acts_on_batches, is_stock

of = keras.callbacks


class Own(of.ModelCheckpoint):
    """Saves each epoch, and has a method of batches of its own."""

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Does something."""


@pytest.mark.parametrize(
    ("callback", "acts"),
    [
        (of.Callback(), False),
        (of.EarlyStopping(), False),
        (of.TerminateOnNaN(), True),
        (of.LambdaCallback(on_epoch_end=print), False),
        (of.LambdaCallback(on_train_batch_begin=print), True),
        (of.ModelCheckpoint("a.keras"), False),
        (of.ModelCheckpoint("a.keras", save_freq=3), True),
        (Own("a.keras"), True),
        (of.TensorBoard(), False),
        (of.TensorBoard(update_freq=5), True),
        (of.TensorBoard(profile_batch=(2, 3)), True),
        (tf_keras.callbacks.EarlyStopping(), False),
        (tf_keras.callbacks.LambdaCallback(on_batch_end=print), True),
        (tf_keras.callbacks.TensorBoard(), False),
        (tf_keras.callbacks.ModelCheckpoint("a", save_freq=3), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callback_acts_on_batches_by_its_methods(callback: Any, acts: bool) -> None:
    assert acts_on_batches(callback, TRAIN_BATCHES) is acts


def test_methods_of_evaluation_batches_are_apart() -> None:
    callback = of.LambdaCallback(on_test_batch_end=print)
    assert acts_on_batches(callback, TEST_BATCHES)
    assert not acts_on_batches(callback, TRAIN_BATCHES)


@pytest.mark.parametrize(("verbose", "acts"), [(0, False), (1, True), (2, False), ("auto", True)])
def test_a_progress_bar_is_drawn_for_batches(verbose: Any, acts: bool) -> None:
    bar = of.ProgbarLogger()
    bar.set_params({"verbose": verbose, "epochs": 1, "steps": 1})
    assert acts_on_batches(bar, TRAIN_BATCHES) is acts


def test_a_class_of_the_caller_is_not_the_stock_one_of_its_name() -> None:
    class History(of.Callback):
        """Has the name of another class."""

    assert is_stock(of.History(), "History")
    assert not is_stock(History(), "History")
