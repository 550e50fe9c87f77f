"""Callbacks of Keras see what Model.fit shows them, and their state is in checkpoints."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.engine.compat.keras.keras_programs import CROSSENTROPY, X, Y
from trainer_kit import Callback
from trainer_kit.compat import keras as tk_keras
from trainer_kit.telemetry.metrics_jsonl import reported


class Recorder(keras.callbacks.Callback):
    """Keeps the names of the methods that are called, with epochs and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_epoch", "on_train_begin", "on_train_end", "on_test_begin", "on_test_end")):
            return lambda *given, **named: self.calls.append((name, *map(str, [*given, *named.values()])))
        return super().__getattribute__(name)


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
    options = {"epochs": 4, "validation_data": (X, Y), "verbose": 0, **options}
    return tk_keras.fit(model, X, Y, callbacks=callbacks, model_dir=str(folder), **options)


def seeded() -> Any:
    """A model of one layer: what is traced takes most of the time of a fit."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", CROSSENTROPY, metrics=["accuracy"], jit_compile=False)
    return model


def test_the_methods_of_epochs_are_called_as_in_keras(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours, saves = Recorder(), Recorder(), Saves()
    seeded().fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[theirs])
    with caplog.at_level(logging.WARNING):
        callbacks = [ours, saves, keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))]
        fit(seeded(), tmp_path / "run", callbacks, epochs=2)
    assert [call[:2] for call in ours.calls if "epoch" in call[0]] == [
        call[:2] for call in theirs.calls if "epoch" in call[0]
    ]
    assert [call[0] for call in ours.calls] == [call[0] for call in theirs.calls]
    assert saves.steps[-2:] == [8, 8]  # again after the last methods, for what they change
    assert "BackupAndRestore is left out" in caplog.text
    assert not (tmp_path / "backup").exists()


def test_a_resumed_run_lowers_the_rate_once_per_epoch(tmp_path: Path) -> None:
    def halve(epoch: int, rate: float) -> float:
        return rate / 2 if epoch else rate

    def lowered(folder: str, *others: Any) -> Any:
        callbacks = [keras.callbacks.LearningRateScheduler(halve), *others]
        return fit(seeded(), tmp_path / folder, callbacks, checkpoint_interval=2)

    whole = lowered("a")
    for stopped_at in (6, 8):  # inside of the second epoch, and at its end
        with pytest.raises(RuntimeError, match="stopped by the test"):
            lowered("b", StopAt(stopped_at))
    resumed = lowered("b")
    assert resumed.history == whole.history
    assert resumed.history["learning_rate"] == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])


class Copies(Callback):
    """Copies the folder of a run when the evaluation of step 8 is recorded, and no later checkpoint is saved."""

    def __init__(self, to: Path) -> None:
        self._to = to

    def loop_end(self, run: Any, logs: Any) -> None:
        if run.step == 12:
            deadline = time.monotonic() + 10
            while not reported(f"{run.directory}/metrics.jsonl", "validation", 8) and time.monotonic() < deadline:
                time.sleep(0.01)
            shutil.copytree(run.directory, self._to)


def test_what_methods_of_an_evaluation_change_survives_a_kill(tmp_path: Path) -> None:
    class Lowers(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)

        def on_test_end(self, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.8)

    whole, resumed = seeded(), seeded()
    fit(whole, tmp_path / "a", [Lowers(), Copies(tmp_path / "b")])
    fit(resumed, tmp_path / "b", [Lowers()])
    assert float(resumed.optimizer.learning_rate) == float(whole.optimizer.learning_rate)
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_restart_goes_on_waiting_with_the_programs_patience(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(seeded(), tmp_path, [keras.callbacks.EarlyStopping("val_loss", 10.0, 9), StopAt(12)], epochs=9)
    history = fit(seeded(), tmp_path, [keras.callbacks.EarlyStopping("val_loss", 10.0, 4)], epochs=9)
    assert history.epoch == [0, 1, 2, 3, 4]  # two epochs were waited before: it would be 7 to wait for all four again


def test_a_plain_fit_saves_once_and_predict_has_callbacks(tmp_path: Path) -> None:
    saves, noted, model = Saves(), [], seeded()
    fit(model, tmp_path, [saves], epochs=1)
    assert saves.steps == [4]
    callback = keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: noted.append(batch))
    tk_keras.predict(model, X, verbose=0, callbacks=[callback], model_dir=str(tmp_path))
    assert noted == [0, 1, 2, 3]
