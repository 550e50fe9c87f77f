"""Each callback that Keras ships does in fit what it does in Model.fit."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.builders import json_lines
from tests.engine.compat.keras.keras_programs import X, Y, assert_same_history, linear
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.keras_callbacks import split_callbacks


class Recorder(keras.callbacks.Callback):
    """Keeps the names of the methods that are called, with epochs and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(
            ("on_epoch", "on_train_begin", "on_train_end", "on_test_begin", "on_test_end")
        ):

            def record_call(*arguments: Any, **named: Any) -> None:
                self.calls.append((name, *map(str, [*arguments, *named.values()])))

            return record_call
        return super().__getattribute__(name)


class Fit:
    """A fit with all callbacks that can be in one, and what they have left."""

    def __init__(self, folder: Path, run: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        keras.utils.clear_session()  # the names of layers are those of the first model
        self.model = linear(metrics=["accuracy"])
        self.stopping = keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=10.0, start_from_epoch=2, restore_best_weights=True
        )
        self.own_history = keras.callbacks.History()
        self.recorder = Recorder()
        options = {
            "epochs": 9,
            "validation_data": (X[:70], Y[:70]),
            "verbose": 1,
            "callbacks": self.callbacks(),
        }
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            self.history = run(self, **options)
        self.shown = shown.getvalue()

    def callbacks(self) -> list[Any]:
        of = keras.callbacks
        epochs = str(self.folder / "{epoch}-{val_loss:.4f}.keras")
        best = str(self.folder / "best.weights.h5")
        batches = str(self.folder / "{epoch}-{batch}-{loss:.4f}.weights.h5")
        return [
            of.LearningRateScheduler(lambda epoch, rate: rate * 0.9 if epoch else rate),
            of.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.3),
            of.ModelCheckpoint(epochs),
            of.ModelCheckpoint(batches, save_freq=6, save_weights_only=True),
            of.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
            of.CSVLogger(str(self.folder / "log.csv")),
            of.TensorBoard(str(self.folder / "board"), update_freq="batch", histogram_freq=2),
            of.TerminateOnNaN(),
            self.stopping,
            self.own_history,
            of.ProgbarLogger(),
            self.recorder,
        ]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / "log.csv").read_text().splitlines()))

    def curves(self, kind: str) -> dict[str, list[tuple[int, float]]]:
        board = EventAccumulator(
            str(self.folder / "board" / kind), size_guidance={"tensors": 0}
        ).Reload()
        return {
            tag: [
                (event.step, float(np.sum(event.tensor_proto.float_val)))
                for event in board.Tensors(tag)
            ]
            for tag in board.Tags()["tensors"]
            if not tag.endswith(("keras", "histogram"))
        }


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fit, Fit]]:
    """The fit of Keras and that of trainer_kit."""
    folder = tmp_path_factory.mktemp("stock")

    def run_keras(fit: Fit, **options: Any) -> Any:
        return fit.model.fit(X, Y, **options)

    def run_trainer_kit(fit: Fit, callbacks: list[Any], **options: Any) -> Any:
        backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
        run = str(folder / "run")
        return tk_keras.fit(
            fit.model, X, Y, callbacks=[*callbacks, backup], model_dir=run, **options
        )

    # A bar is drawn after every batch: a fast fit leaves some out.
    bar = functools.partialmethod(keras.utils.Progbar.__init__, interval=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.utils.Progbar, "__init__", bar)
        yield Fit(folder / "theirs", run_keras), Fit(folder / "ours", run_trainer_kit)


def are_close(values: Any, expected: Any) -> bool:
    return bool(np.allclose(values, expected, rtol=1e-6, atol=1e-6))


def test_rates_and_early_stopping_have_the_history_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.history is ours.own_history
    assert ours.history.epoch == theirs.history.epoch == [0, 1, 2, 3, 4]
    assert list(ours.history.history) == list(theirs.history.history)
    assert all(
        are_close(ours.history.history[name], values)
        for name, values in theirs.history.history.items()
    )
    assert len(set(ours.history.history["learning_rate"])) > 3


def test_early_stopping_puts_the_best_weights_back(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.stopping.best_epoch == theirs.stopping.best_epoch == 2
    assert all(map(are_close, ours.model.get_weights(), theirs.model.get_weights()))


def test_model_checkpoint_writes_the_files_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.files() == theirs.files()

    last = next(name for name in ours.files() if name.startswith("5-") and name.endswith(".keras"))
    models = [keras.models.load_model(fit.folder / last) for fit in fits]

    assert all(map(are_close, models[1].get_weights(), models[0].get_weights()))
    assert are_close(*(model.optimizer.learning_rate for model in models))

    of_a_batch = next(name for name in ours.files() if name.startswith("5-") and name != last)
    for name in ("best.weights.h5", of_a_batch):
        for model, fit in zip(models, fits, strict=True):
            model.load_weights(fit.folder / name)
        assert all(map(are_close, models[1].get_weights(), models[0].get_weights()))


def test_csv_logger_writes_the_rows_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (fit.rows() for fit in fits)

    assert [list(row) for row in ours] == [list(row) for row in theirs]
    values = [[[float(value) for value in row.values()] for row in rows] for rows in (ours, theirs)]
    assert are_close(*values)


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_tensorboard_writes_the_curves_of_keras(fits: tuple[Fit, Fit], kind: str) -> None:
    theirs, ours = (fit.curves(kind) for fit in fits)

    assert ours.keys() == theirs.keys()
    assert all(are_close(ours[tag], values) for tag, values in theirs.items())


def test_swap_ema_weights_evaluates_and_leaves_the_average(tmp_path: Path) -> None:
    histories = []
    for folder in ({}, {"model_dir": str(tmp_path)}):
        model = linear(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
        options = {
            "epochs": 3,
            "validation_data": (X[:70], Y[:70]),
            "verbose": 0,
            "callbacks": callbacks,
        }
        door = tk_keras.fit if folder else keras.Model.fit
        histories.append(door(model, X, Y, **options, **folder))

    theirs, ours = histories
    assert_same_history(ours, theirs)
    assert all(map(are_close, ours.model.get_weights(), theirs.model.get_weights()))
    tk_keras.load(model, str(tmp_path), "best")
    best = model.evaluate(X[:70], Y[:70], verbose=0)
    assert are_close(best, min(ours.history["val_loss"]))


def test_progbar_logger_shows_the_bar_of_keras(fits: tuple[Fit, Fit]) -> None:
    bars = []
    for fit in fits:
        text = re.sub(r"[\x08\r ]+|\x1b\[[\d;]*m", " ", fit.shown)
        bars.append(re.sub(r"\d+(s|ms|us)\b", "", text))
    theirs, ours = bars

    assert ours.count("━") == theirs.count("━") > 0
    assert re.findall(r"loss: [\d.]+", ours) == re.findall(r"loss: [\d.]+", theirs)


def test_the_methods_of_epochs_are_called_as_in_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (fit.recorder.calls for fit in fits)

    their_epochs = [call[:2] for call in theirs if "epoch" in call[0]]
    assert [call[:2] for call in ours if "epoch" in call[0]] == their_epochs
    assert [call[0] for call in ours] == [call[0] for call in theirs]


def test_a_loop_of_one_step_is_reported_with_its_epoch(fits: tuple[Fit, Fit]) -> None:
    run = fits[1].folder.parent / "run"
    records = json_lines(run / "metrics.jsonl")

    assert [record["step"] for record in records if record["kind"] == "train"] == [4, 8, 12, 16, 20]
    assert max(complete_checkpoints(str(run))) == 20


def test_backups_are_left_to_the_checkpoints(
    fits: tuple[Fit, Fit], caplog: pytest.LogCaptureFixture
) -> None:
    assert not (fits[1].folder.parent / "backup").exists()
    assert split_callbacks([keras.callbacks.BackupAndRestore("backup")]) == ([], [])
    assert "BackupAndRestore is left out" in caplog.text
