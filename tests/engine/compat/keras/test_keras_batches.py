"""Methods of Keras callbacks around batches are called as by Model.fit, with the same logs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

from tests.engine.compat.keras.keras_programs import X, Y, assert_same_weights, linear
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.callback_state import is_keras_callback
from trainer_kit.compat.keras.keras_callbacks import TRAIN_BATCH_METHODS, acts_on_batches
from trainer_kit.errors import PreemptedError

Calls = list[tuple[Any, ...]]


class Batches(keras.callbacks.Callback):
    """Notes each method around batches and evaluations that is called, with number and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch_begin", batch, logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("train_batch_end", batch, logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch_end", epoch, logs))

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("test_begin", 0, logs))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test_batch_begin", batch, logs))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test_batch_end", batch, logs))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("test_end", 0, logs))


class WarmUp(keras.callbacks.Callback):
    """Sets the learning rate before each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 1e-3 * (batch + 1)


def fit(model: Any, folder: Path | None, callbacks: list[Any], **options: Any) -> Any:
    """Trains on four batches in each epoch: with Keras if there is no folder."""
    options = {
        "epochs": 2,
        "validation_data": (X[:70], Y[:70]),
        "verbose": 0,
        "callbacks": callbacks,
        **options,
    }
    if folder is None:
        return model.fit(X, Y, **options)
    return tk_keras.fit(model, X, Y, model_dir=str(folder), **options)


def assert_same_calls(calls: Calls, expected_calls: Calls) -> None:
    """Checks that methods, numbers and keys are the same, and the values to 1e-6."""
    assert [call[:2] for call in calls] == [call[:2] for call in expected_calls]
    for (method, batch, logs), (_, _, expected_logs) in zip(calls, expected_calls, strict=True):
        values = logs or {}
        expected = expected_logs or {}
        assert list(values) == list(expected), (method, batch)
        assert all(type(value) is float for value in values.values())
        np.testing.assert_allclose([*values.values()], [*expected.values()], 1e-6, 1e-6)


def test_batches_and_a_stop_between_them_are_those_of_keras(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # After three of the four batches.
            self.model.stop_training = self.model.optimizer.iterations == 7

    theirs = Batches()
    their_model = linear(metrics=["accuracy"])
    expected = fit(their_model, None, [theirs, WarmUp(), Stop()], epochs=4)
    ours = Batches()
    our_model = linear(metrics=["accuracy"])
    history = fit(our_model, tmp_path, [ours, WarmUp(), Stop()], epochs=4)

    assert_same_calls(ours.calls, theirs.calls)
    assert history.epoch == expected.epoch == [0, 1]
    np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-6)
    np.testing.assert_allclose(
        our_model.get_weights()[0], their_model.get_weights()[0], rtol=1e-6, atol=1e-6
    )

    # Calls are state: those of an earlier start come back.
    again = Batches()
    finished = linear(metrics=["accuracy"])
    assert fit(finished, tmp_path, [again], epochs=4).history == history.history
    assert len(again.calls) == len(ours.calls)
    np.testing.assert_array_equal(finished.get_weights()[0], our_model.get_weights()[0])


def test_stops_and_errors_between_batches_lose_no_step(tmp_path: Path) -> None:
    class Interrupting(keras.callbacks.Callback):
        stops_at = error_at = -1

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == self.stops_at:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)  # so that the step does not begin before the signal is known

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == self.error_at:
                raise StopIteration("a mistake of the callback")

    def train_model(folder: str, *callbacks: Any) -> tuple[Any, Any]:
        model = linear()
        return fit(model, tmp_path / folder, list(callbacks), validation_data=None), model

    whole = Batches()
    expected, uninterrupted_model = train_model("whole", whole)

    batches = Batches()
    interrupting = Interrupting()
    interrupting.stops_at = 3
    with pytest.raises(PreemptedError, match="at step 3"):
        train_model("run", batches, interrupting)

    interrupting.stops_at = -1
    interrupting.error_at = 6
    message = r"Interrupting\.on_train_batch_end raised StopIteration"
    with pytest.raises(RuntimeError, match=message):
        train_model("run", batches, interrupting)

    interrupting.error_at = -1
    resumed, resumed_model = train_model("run", batches, interrupting)
    assert resumed.history == expected.history
    assert batches.calls == whole.calls
    assert_same_weights(resumed_model, uninterrupted_model)


def test_terminate_on_nan_ends_an_eager_run_at_the_batch(tmp_path: Path) -> None:
    weight = np.ones(100, "float32")
    weight[40] = np.nan  # in the second batch
    options = {"epochs": 3, "shuffle": False, "sample_weight": weight}

    theirs = Batches()
    fit(linear(run_eagerly=True), None, [keras.callbacks.TerminateOnNaN(), theirs], **options)
    ours = Batches()
    history = fit(
        linear(run_eagerly=True), tmp_path, [keras.callbacks.TerminateOnNaN(), ours], **options
    )
    assert history.epoch == [0]
    assert_same_calls(ours.calls, theirs.calls)


def test_callbacks_of_tf_keras_have_its_numbers(tmp_path: Path) -> None:
    class Noting(tf_keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Calls = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls.append((batch, int(self.model._train_counter), {**logs}))

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls.append((batch, int(self.model._test_counter), {**logs}))

    def build_model() -> Any:
        tf_keras.utils.set_random_seed(3)
        model = tf_keras.Sequential([tf_keras.Input((8,)), tf_keras.layers.Dense(3)])
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
        return model

    theirs = Noting()
    fit(build_model(), None, [theirs])
    ours = Noting()
    fit(build_model(), tmp_path, [ours])

    assert [call[:2] for call in ours.calls] == [call[:2] for call in theirs.calls]
    for (_, _, logs), (_, _, expected) in zip(ours.calls, theirs.calls, strict=True):
        assert logs == pytest.approx(expected, abs=1e-6)


# ---- which callbacks act on batches


class Own(keras.callbacks.ModelCheckpoint):
    """Saves each epoch, and has a method of batches of its own."""

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Does something."""


def build_progress_bar(verbose: Any) -> Any:
    bar = keras.callbacks.ProgbarLogger()
    bar.set_params({"verbose": verbose, "epochs": 1, "steps": 1})
    return bar


@pytest.mark.parametrize(
    ("callback", "acts"),
    [
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=print), False),
        (keras.callbacks.LambdaCallback(on_test_batch_end=print), False),
        (keras.callbacks.LambdaCallback(on_train_batch_begin=print), True),
        (keras.callbacks.ModelCheckpoint("a.keras"), False),
        (keras.callbacks.ModelCheckpoint("a.keras", save_freq=3), True),
        (Own("a.keras"), True),
        (keras.callbacks.TensorBoard(), False),
        (keras.callbacks.TensorBoard(update_freq=5), True),
        (keras.callbacks.TensorBoard(profile_batch=(2, 3)), True),
        (build_progress_bar("auto"), True),
        (build_progress_bar(2), False),
        (tf_keras.callbacks.LambdaCallback(on_batch_end=print), True),
        (tf_keras.callbacks.TensorBoard(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callback_acts_on_batches_by_its_methods(callback: Any, acts: bool) -> None:
    assert acts_on_batches(callback, TRAIN_BATCH_METHODS) is acts


def test_a_class_of_the_caller_is_not_the_stock_one_of_its_name() -> None:
    class History(keras.callbacks.Callback):
        """Has the name of another class."""

    assert is_keras_callback(keras.callbacks.History(), "History")
    assert not is_keras_callback(History(), "History")
