"""Callbacks of Keras see what Model.fit shows them, and their state is in checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.builders import wait_until
from tests.engine.compat.keras.keras_programs import X, assert_same_weights, linear, pairs
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit import Callback
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.keras_callbacks import KerasCallbacks
from trainer_kit.errors import UsageError
from trainer_kit.run.runner import run_experiment
from trainer_kit.telemetry.metrics_jsonl import has_report


class StopAt(Callback):
    """Ends the run with an error at the end of the loop that reaches a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def loop_end(self, run: Any, logs: Any) -> None:
        if run.step == self._step:
            raise RuntimeError("stopped by the test")


class Saves(Callback):
    """Counts the saves of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def checkpoint_begin(self, run: Any) -> None:
        self.steps.append(run.step)


def fit(model: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Trains on four batches in each epoch."""
    options = {"epochs": 4, "validation_data": pairs().batch(25), "verbose": 0, **options}
    return tk_keras.fit(
        model, pairs().batch(25), callbacks=callbacks, model_dir=str(folder), **options
    )


def test_a_run_of_a_native_task_calls_callbacks_of_keras(tmp_path: Path) -> None:
    lengths = {
        "steps_per_epoch": 2,
        "steps_per_loop": 2,
        "checkpoint_interval": 2,
        "summary_interval": 2,
    }
    config = linear_experiment(train_steps=4, **lengths)
    epochs: list[int] = []
    of_keras = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    callbacks = [KerasCallbacks([of_keras])]
    run_experiment(
        None, LinearTask(config.task), "train", config, str(tmp_path), callbacks=callbacks
    )

    assert epochs == [0, 1]


def test_a_resumed_run_goes_on_with_rate_patience_and_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def halve(epoch: int, rate: float) -> float:
        return rate / 2 if epoch else rate

    def run(folder: str, *others: Any, patience: int = 4) -> Any:
        callbacks = [
            keras.callbacks.LearningRateScheduler(halve),
            keras.callbacks.EarlyStopping("val_loss", 10.0, patience),
            keras.callbacks.ProgbarLogger(),
            *others,
        ]
        return fit(
            linear(), tmp_path / folder, callbacks, epochs=9, checkpoint_interval=2, verbose=1
        )

    whole = run("whole")
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("stopped", StopAt(12), patience=9)  # at the end of the third epoch
    capsys.readouterr()
    resumed = run("stopped")  # the program's patience counts, not that of the checkpoint

    assert resumed.history == whole.history
    assert_same_weights(resumed.model, whole.model)
    rates = [1e-2 * 0.5**epoch for epoch in range(5)]
    assert resumed.history["learning_rate"] == pytest.approx(rates)
    # Epochs that were waited for before the stop count: with four more there would be more epochs.
    assert resumed.epoch == [0, 1, 2, 3, 4]
    titles = re.findall(r"Epoch \d/\d", capsys.readouterr().out)
    assert titles == ["Epoch 3/9", "Epoch 4/9", "Epoch 5/9"]


class Copies(Callback):
    """Copies the folder of a run when the evaluation of step 8 is recorded, and no later checkpoint
    is saved.
    """

    def __init__(self, to: Path) -> None:
        self._to = to

    def loop_end(self, run: Any, logs: Any) -> None:
        if run.step == 12:
            history = f"{run.directory}/metrics.jsonl"
            wait_until(lambda: has_report(history, "validation", 8))
            shutil.copytree(run.directory, self._to)


def test_changes_by_methods_of_an_evaluation_survive_a_kill(tmp_path: Path) -> None:
    class Lowers(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)

        def on_test_end(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.8)

    whole = linear()
    fit(whole, tmp_path / "a", [Lowers(), Copies(tmp_path / "b")])
    resumed = linear()
    fit(resumed, tmp_path / "b", [Lowers()])

    assert float(resumed.optimizer.learning_rate) == float(whole.optimizer.learning_rate)
    assert_same_weights(resumed, whole)


class Lowers(keras.callbacks.Callback):
    """Trains with another rate, and may stop the fit in its second epoch; calls `note` with the
    name of each event.
    """

    def __init__(self, note: Any, stops: bool) -> None:
        super().__init__()
        self.note = note
        self.stops = stops
        self.rate_before: float | None = None
        self.rates: list[float] = []
        self.losses: dict[int, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("on_train_begin")
        self.rate_before = float(self.model.optimizer.learning_rate)
        self.rates = []
        self.losses = {}
        self.model.optimizer.learning_rate = 1e-5

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("on_epoch_end")
        self.rates.append(float(self.model.optimizer.learning_rate))
        self.losses[epoch] = logs["loss"]
        self.model.optimizer.learning_rate = 1e-3 * (epoch + 1)
        self.model.stop_training = self.stops and epoch == 1

    def on_train_end(self, logs: Any = None) -> None:
        self.note("on_train_end")
        self.model.optimizer.learning_rate = self.rate_before / 2
        self.best = min(self.losses.values())


def fit_with(callback: Lowers, folder: Path, *others: Any) -> Any:
    """Returns a new model after a fit with the callback, without an evaluation."""
    model = linear()
    options = {"validation_data": None, "checkpoint_interval": 2}
    fit(model, folder, [callback, *others], **options)
    return model


def assert_finished_fit_restores(first: Lowers, model: Any, folder: Path) -> None:
    """Checks that another fit in the folder restores callback and model, and calls no event."""
    events: list[str] = []
    again = Lowers(events.append, first.stops)
    restored = fit_with(again, folder)

    assert events == []
    assert again.rate_before == first.rate_before
    assert again.losses == first.losses
    assert again.best == first.best
    assert float(restored.optimizer.learning_rate) == float(model.optimizer.learning_rate)
    assert again.model is restored
    assert restored.stop_training == model.stop_training == first.stops


def test_on_train_begin_changes_nothing_in_a_resumed_run(tmp_path: Path) -> None:
    events: list[str] = []
    with pytest.raises(RuntimeError, match="stopped by the test"):
        # Inside of the third epoch.
        fit_with(Lowers(events.append, stops=False), tmp_path, StopAt(10))
    resumed = Lowers(events.append, stops=False)
    model = fit_with(resumed, tmp_path)

    assert events.count("on_train_begin") == 2
    assert resumed.rate_before == pytest.approx(1e-2)
    assert resumed.rates == pytest.approx([1e-5, 1e-3, 2e-3, 3e-3])
    assert list(resumed.losses) == [0, 1, 2, 3]
    assert float(model.optimizer.learning_rate) == pytest.approx(5e-3)

    assert_finished_fit_restores(resumed, model, tmp_path)


def test_a_fit_that_a_callback_ended_calls_no_event_again(tmp_path: Path) -> None:
    events: list[str] = []
    first = Lowers(events.append, stops=True)
    model = fit_with(first, tmp_path)
    assert events == ["on_train_begin", "on_epoch_end", "on_epoch_end", "on_train_end"]

    assert_finished_fit_restores(first, model, tmp_path)


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_a_callback_that_compiles_the_model_ends_the_run(event: str, tmp_path: Path) -> None:
    model = linear()

    def compile_again(epoch: Any, logs: Any = None) -> None:
        if event == "on_train_begin" or epoch == 1:
            model.compile(model.optimizer, model.loss)

    callback = keras.callbacks.LambdaCallback(**{event: compile_again})
    message = r"called model\.compile, which has no effect.*another model_dir"

    with pytest.raises(UsageError, match=message):
        fit(model, tmp_path, [callback], validation_data=None)


def test_a_layer_that_is_frozen_late_is_trained_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    kernels = []

    def freeze(epoch: int, logs: Any) -> None:
        kernels.append(model.layers[0].kernel.numpy())
        model.layers[0].trainable = epoch != 1

    freezing = keras.callbacks.LambdaCallback(on_epoch_begin=freeze)
    fit(model, tmp_path, [freezing], epochs=2, validation_data=None)

    assert caplog.text.count("layer.trainable was changed") == 1
    assert not np.array_equal(model.get_weights()[0], kernels[1])


def test_a_plain_fit_saves_once_and_predict_has_callbacks(tmp_path: Path) -> None:
    saves = Saves()
    model = linear()

    fit(model, tmp_path, [saves], epochs=1, validation_data=None)
    assert saves.steps == [4]

    batches: list[int] = []
    callback = keras.callbacks.LambdaCallback(
        on_predict_batch_end=lambda batch, logs: batches.append(batch)
    )
    tk_keras.predict(model, X, verbose=0, callbacks=[callback], model_dir=str(tmp_path))
    assert batches == [0, 1, 2, 3]
