"""Each callback that Keras ships does in fit what it does in Model.fit."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.compat.keras.keras_programs import CROSSENTROPY, X, Y
from trainer_kit import Callback
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.keras_callbacks import split_callbacks


class Monitor:
    """A server that notes what RemoteMonitor sends."""

    def __init__(self) -> None:
        self.received: list[dict[str, float]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def callback(self) -> Any:
        root = f"http://127.0.0.1:{self.server.server_port}"
        return keras.callbacks.RemoteMonitor(root=root, send_as_json=True)


def linear(optimizer: Any = "sgd") -> Any:
    """A model of one layer: what is traced takes most of the time of a fit."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile(optimizer, CROSSENTROPY, metrics=["accuracy"], jit_compile=False)
    return model


class Recorder(keras.callbacks.Callback):
    """Keeps the names of the methods that are called, with epochs and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_epoch", "on_train_begin", "on_train_end", "on_test_begin", "on_test_end")):
            return lambda *given, **named: self.calls.append((name, *map(str, [*given, *named.values()])))
        return super().__getattribute__(name)


class Saves(Callback):
    """Counts the saves of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def checkpoint_begin(self, run: Any) -> None:
        self.steps.append(run.step)


class Fit:
    """A fit with all callbacks that can be in one, and what they have left."""

    def __init__(self, folder: Path, run: Any) -> None:
        self.folder, self.monitor, self.events, self.batches = folder, Monitor(), [], []
        folder.mkdir(parents=True)
        keras.utils.clear_session()  # the names of layers are those of the first model
        self.model = linear()
        self.stopping = keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=10.0, start_from_epoch=2, restore_best_weights=True
        )
        self.own_history, self.recorder, self.saves = keras.callbacks.History(), Recorder(), Saves()
        options = {"epochs": 9, "validation_data": (X[:70], Y[:70]), "verbose": 1, "callbacks": self.callbacks()}
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            self.history = run(self, **options)
        self.shown = shown.getvalue()
        self.monitor.server.shutdown()

    def callbacks(self) -> list[Any]:
        of = keras.callbacks
        epochs, best = str(self.folder / "{epoch}-{val_loss:.4f}.keras"), str(self.folder / "best.weights.h5")
        batches = str(self.folder / "{epoch}-{batch}-{loss:.4f}.weights.h5")
        return [
            of.LearningRateScheduler(lambda epoch, rate: rate * 0.9 if epoch else rate),
            of.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.3),
            of.ModelCheckpoint(epochs),
            of.ModelCheckpoint(batches, save_freq=6, save_weights_only=True),
            of.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
            of.CSVLogger(str(self.folder / "log.csv")),
            of.TensorBoard(str(self.folder / "board"), update_freq="batch", histogram_freq=2),
            of.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: self.events.append(epoch),
                on_train_batch_end=lambda batch, logs: self.batches.append((batch, logs["loss"])),
            ),
            self.monitor.callback(),
            of.TerminateOnNaN(),
            self.stopping,
            self.own_history,
            of.ProgbarLogger(),
            self.recorder,
        ]

    def files(self) -> list[str]:
        return sorted(one.name for one in self.folder.iterdir() if one.is_file())

    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / "log.csv").read_text().splitlines()))

    def curves(self, kind: str) -> dict[str, list[tuple[int, float]]]:
        board = EventAccumulator(str(self.folder / "board" / kind), size_guidance={"tensors": 0}).Reload()
        return {
            tag: [(one.step, float(np.sum(one.tensor_proto.float_val))) for one in board.Tensors(tag)]
            for tag in board.Tags()["tensors"]
            if not tag.endswith(("keras", "histogram"))
        }


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fit, Fit]]:
    """The fit of Keras and that of trainer_kit."""
    folder = tmp_path_factory.mktemp("stock")

    def of_keras(fit: Fit, **options: Any) -> Any:
        return fit.model.fit(X, Y, **options)

    def of_ours(fit: Fit, callbacks: list[Any], **options: Any) -> Any:
        others = [fit.saves, keras.callbacks.BackupAndRestore(str(folder / "backup"))]
        return tk_keras.fit(fit.model, X, Y, callbacks=[*callbacks, *others], model_dir=str(folder / "run"), **options)

    bar = functools.partialmethod(keras.utils.Progbar.__init__, interval=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.utils.Progbar, "__init__", bar)  # drawn after every batch: a fast fit leaves some out
        yield Fit(folder / "theirs", of_keras), Fit(folder / "ours", of_ours)


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-6, atol=1e-6))


def test_rates_and_early_stopping_have_the_history_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.history.epoch == theirs.history.epoch == [0, 1, 2, 3, 4]
    assert list(ours.history.history) == list(theirs.history.history)
    assert all(close(ours.history.history[name], values) for name, values in theirs.history.history.items())
    assert len(set(ours.history.history["learning_rate"])) > 3


def test_early_stopping_puts_the_best_weights_back(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.stopping.best_epoch == theirs.stopping.best_epoch == 2
    assert all(map(close, ours.model.get_weights(), theirs.model.get_weights()))


def test_a_history_of_the_caller_is_that_of_the_fit(fits: tuple[Fit, Fit]) -> None:
    assert fits[1].history is fits[1].own_history


def test_model_checkpoint_writes_the_files_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.files() == theirs.files()
    last = next(name for name in ours.files() if name.startswith("5-") and name.endswith(".keras"))
    models = [keras.models.load_model(one.folder / last) for one in fits]
    assert all(map(close, models[1].get_weights(), models[0].get_weights()))
    assert close(*(model.optimizer.learning_rate for model in models))
    of_a_batch = next(name for name in ours.files() if name.startswith("5-") and name != last)
    for name in ("best.weights.h5", of_a_batch):
        for model, one in zip(models, fits, strict=True):
            model.load_weights(one.folder / name)
        assert all(map(close, models[1].get_weights(), models[0].get_weights()))


def test_a_loop_of_one_step_is_reported_with_its_epoch(fits: tuple[Fit, Fit]) -> None:
    run = fits[1].folder.parent / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [4, 8, 12, 16, 20]


def test_csv_logger_writes_the_rows_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (one.rows() for one in fits)
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    values = [[[float(value) for value in row.values()] for row in rows] for rows in (ours, theirs)]
    assert close(*values)


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_tensorboard_writes_the_curves_of_keras(fits: tuple[Fit, Fit], kind: str) -> None:
    theirs, ours = (one.curves(kind) for one in fits)
    assert ours.keys() == theirs.keys()
    assert all(close(ours[tag], values) for tag, values in theirs.items())


def test_lambda_callback_is_called_as_in_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = fits
    assert ours.events == theirs.events
    assert close(ours.batches, theirs.batches)


def test_remote_monitor_sends_what_it_sends_in_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (one.monitor.received for one in fits)
    assert [list(one) for one in ours] == [list(one) for one in theirs]
    assert all(close([*one.values()], [*other.values()]) for one, other in zip(ours, theirs, strict=True))


def test_swap_ema_weights_evaluates_and_leaves_the_average(tmp_path: Path) -> None:
    found = []
    for run in (lambda model, **options: model.fit(X, Y, **options), None):
        model = linear(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
        options = {"epochs": 3, "validation_data": (X[:70], Y[:70]), "verbose": 0, "callbacks": callbacks}
        history = run(model, **options) if run else tk_keras.fit(model, X, Y, **options, model_dir=str(tmp_path))
        found.append((history.history, model.get_weights()))
    assert all(close(found[1][0][name], values) for name, values in found[0][0].items())
    assert all(map(close, found[1][1], found[0][1]))
    tk_keras.load(model, str(tmp_path), "best")
    best = model.evaluate(X[:70], Y[:70], verbose=0)[0]
    assert close(best, min(found[1][0]["val_loss"]))


def test_progbar_logger_shows_the_bar_of_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (re.sub(r"\d+(s|ms|us)\b", "", re.sub(r"[\x08\r ]+|\x1b\[[\d;]*m", " ", one.shown)) for one in fits)
    assert ours.count("━") == theirs.count("━") > 0
    assert re.findall(r"loss: [\d.]+", ours) == re.findall(r"loss: [\d.]+", theirs)


def test_the_methods_of_epochs_are_called_as_in_keras(fits: tuple[Fit, Fit]) -> None:
    theirs, ours = (one.recorder.calls for one in fits)
    of_epochs = [[call[:2] for call in calls if "epoch" in call[0]] for calls in (theirs, ours)]
    assert of_epochs[1] == of_epochs[0]
    assert [call[0] for call in ours] == [call[0] for call in theirs]


def test_a_run_saves_again_after_the_last_methods(fits: tuple[Fit, Fit]) -> None:
    assert fits[1].saves.steps[-2:] == [20, 20]  # for what they change
    run = fits[1].folder.parent / "run"
    assert max(complete_checkpoints(str(run))) == 20


def test_backups_are_left_to_the_checkpoints(fits: tuple[Fit, Fit], caplog: pytest.LogCaptureFixture) -> None:
    assert not (fits[1].folder.parent / "backup").exists()
    assert split_callbacks([fits[1].saves, keras.callbacks.BackupAndRestore("backup")]) == ([fits[1].saves], [])
    assert "BackupAndRestore is left out" in caplog.text
