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

from tests.engine.compat.keras.keras_programs import X, Y, classifier
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
    keras.utils.set_random_seed(3)
    return classifier()


def test_the_methods_of_epochs_are_called_as_in_keras(tmp_path: Path) -> None:
    theirs, ours = Recorder(), Recorder()
    seeded().fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[theirs])
    fit(seeded(), tmp_path, [ours], epochs=2)
    assert [call[:2] for call in ours.calls if "epoch" in call[0]] == [
        call[:2] for call in theirs.calls if "epoch" in call[0]
    ]
    assert [call[0] for call in ours.calls] == [call[0] for call in theirs.calls]


@pytest.mark.parametrize("stopped_at", [6, 8])  # inside of the second epoch, and at its end
def test_a_resumed_run_lowers_the_rate_once_per_epoch(stopped_at: int, tmp_path: Path) -> None:
    def halve(epoch: int, rate: float) -> float:
        return rate / 2 if epoch else rate

    options = {"checkpoint_interval": 2}
    whole = fit(seeded(), tmp_path / "a", [keras.callbacks.LearningRateScheduler(halve)], **options)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(seeded(), tmp_path / "b", [keras.callbacks.LearningRateScheduler(halve), StopAt(stopped_at)], **options)
    resumed = fit(seeded(), tmp_path / "b", [keras.callbacks.LearningRateScheduler(halve)], **options)
    assert resumed.history == whole.history
    assert resumed.history["learning_rate"] == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])


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


def test_patience_goes_on_after_a_restart(tmp_path: Path) -> None:
    def stopping() -> Any:
        return keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=10.0)

    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(seeded(), tmp_path, [stopping(), StopAt(12)], epochs=9)
    assert fit(seeded(), tmp_path, [stopping()], epochs=9).epoch == [0, 1, 2, 3]


def test_what_the_program_changes_counts_after_a_restart(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(seeded(), tmp_path, [keras.callbacks.EarlyStopping("val_loss", 10.0, 9), StopAt(12)], epochs=9)
    history = fit(seeded(), tmp_path, [keras.callbacks.EarlyStopping("val_loss", 10.0, 4)], epochs=9)
    assert history.epoch == [0, 1, 2, 3, 4]


def test_a_run_that_a_callback_has_stopped_is_finished(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    first, second, begun = seeded(), seeded(), Recorder()
    history = fit(first, tmp_path, [Stop()])
    again = fit(second, tmp_path, [begun])
    assert again.history == history.history
    assert not [call for call in begun.calls if "epoch" in call[0]]
    np.testing.assert_array_equal(first.get_weights()[0], second.get_weights()[0])


def test_backup_and_restore_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit(seeded(), tmp_path / "run", [keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))], epochs=1)
    assert "BackupAndRestore is left out" in caplog.text
    assert not (tmp_path / "backup").exists()


def test_a_fit_without_callbacks_saves_its_last_step_once(tmp_path: Path) -> None:
    plain, called = Saves(), Saves()
    fit(seeded(), tmp_path / "a", [plain], epochs=1)
    fit(seeded(), tmp_path / "b", [called, keras.callbacks.Callback()], epochs=1)
    assert (plain.steps, called.steps) == ([4], [4, 4])
