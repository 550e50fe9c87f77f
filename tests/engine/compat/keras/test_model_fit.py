"""fit has the numbers of Model.fit, in a folder that a run goes on from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas
from tests.engine.compat.keras.keras_programs import X, Y, assert_same_history, linear, pairs
from tests.engine.compat.keras.tf_keras_programs import tf_keras_linear
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError


def fit_fold(held_out: slice, folder: Path, epochs: int = 1, **options: Any) -> Any:
    """Trains on all examples but some, and evaluates on these."""
    rest = np.delete(np.arange(100), held_out)
    options = {"verbose": 0, "validation_data": (X[held_out], Y[held_out]), **options}
    return tk_keras.fit(linear(), X[rest], Y[rest], epochs=epochs, model_dir=str(folder), **options)


@pytest.fixture(scope="module")
def finished_fold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one epoch without the first half of the examples."""
    folder = tmp_path_factory.mktemp("fold")
    fit_fold(slice(0, 50), folder)
    return folder


def test_epochs_of_another_length_are_refused(finished_fold: Path) -> None:
    with pytest.raises(UsageError, match=r"has 2 steps, and .* it has 3; give the data of the run"):
        fit_fold(slice(0, 20), finished_fold, epochs=2)


def test_folds_that_share_a_folder_are_refused(
    finished_fold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_fold(slice(0, 50), finished_fold)
    assert "nothing to do: the run in" in capsys.readouterr().out

    message = r"task\.train_data: .*\n.*task\.validation_data: the data has changed"
    with pytest.raises(UsageError, match=message):
        fit_fold(slice(50, 100), finished_fold)


def test_other_validation_labels_are_refused(finished_fold: Path) -> None:
    message = r"^task\.validation_data: .*: array 1 was int64 \[50\]"
    with pytest.raises(UsageError, match=message):
        fit_fold(slice(0, 50), finished_fold, epochs=2, validation_data=(X[:50], Y[49::-1]))


def test_a_run_goes_on_with_other_data_that_is_allowed(finished_fold: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_fold, tmp_path / "fold")
    allowed = [
        "trainer.steps_per_epoch",
        "task.train_data.identity",
        "task.validation_data.identity",
    ]
    again = fit_fold(slice(80, 100), folder, epochs=2, allow_config_change=allowed)

    assert again.model.optimizer.iterations == 2 * 3


def test_shuffled_validation_data_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(name: str, **options: Any) -> None:
        validation = pairs().shuffle(100, 3).batch(20)
        folder = str(tmp_path / name)
        tk_keras.fit(
            linear(), X, Y, validation_data=validation, verbose=0, model_dir=folder, **options
        )

    message = r"validation_data: shuffle\(\) draws another order in each evaluation"
    with pytest.raises(UsageError, match=message):
        fit("a", trainer={"require_exact_resume": True})

    fit("b", epochs=2)
    assert caplog.text.count("validation_data: shuffle() draws another order") == 1


def test_shuffles_in_one_order_and_of_arrays_resume_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_one_order = pairs().shuffle(100, 3, reshuffle_each_iteration=False).batch(20)
    options = {"validation_data": in_one_order, "trainer": {"require_exact_resume": True}}
    tk_keras.fit(tf_keras_linear(), X, Y, verbose=0, model_dir=str(tmp_path), **options)

    assert "resume is not exact" not in caplog.text
    assert "validation_data" not in caplog.text


class _Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(25 * index, 25 * index + 25)
        return X[rows], Y[rows]


def test_a_run_goes_on_with_data_of_another_kind(tmp_path: Path) -> None:
    dataset = pairs().shuffle(100, seed=3).batch(25)
    for epochs, data in enumerate([dataset, _Batches(), dataset], 1):
        history = tk_keras.fit(linear(), data, epochs=epochs, verbose=0, model_dir=str(tmp_path))

    assert history.epoch == [0, 1, 2]


def test_a_fit_stays_in_its_folder_after_os_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    leave = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: os.chdir(tmp_path / "other")
    )
    first = tk_keras.fit(linear(), X, Y, epochs=2, verbose=0, model_dir="run", callbacks=[leave])

    assert os.listdir("../other") == []

    monkeypatch.chdir(tmp_path)
    again = tk_keras.fit(linear(), X, Y, epochs=2, verbose=0, model_dir="run")

    assert_same_history(again, first)
    assert again.model.optimizer.iterations == 8


class ReturnsLoss(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return self.compute_loss(y=data[1], y_pred=self(data[0]))


class StaticSize(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        # A dataset that drops the remainder tells the size of a batch.
        targets = np.zeros((data[0].shape[0], 3), "float32")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - targets))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": loss}


def test_a_step_may_need_the_size_of_a_batch(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20, drop_remainder=True)
    histories = []
    for folder in ({}, {"model_dir": str(tmp_path)}):
        with replicas(2).scope():
            model = StaticSize(
                [keras.Input((8,)), keras.layers.Dense(3, kernel_initializer="ones")]
            )
            model.compile("sgd", jit_compile=False)
        door = tk_keras.fit if folder else keras.Model.fit
        histories.append(door(model, dataset, epochs=2, verbose=0, **folder))

    assert_same_history(histories[1], histories[0])


class ReturnsOutputs(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {"loss": 0.0, "outputs": self(data[0])}


DENSE = [keras.Input((8,)), keras.layers.Dense(3)]
MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "not compiled": (lambda: keras.Sequential(DENSE), {}, r"is not compiled; call model\.compile"),
    "no optimizer": (
        lambda: linear(optimizer=None),
        {},
        r"compiled without an optimizer.*optimizer=\"adam\"",
    ),
    "a tensor from test_step": (
        lambda: build_compiled(ReturnsLoss),
        {},
        r"test_step returned a SymbolicTensor.* return \{\"loss\": loss\}",
    ),
    "outputs from train_step": (
        lambda: build_compiled(ReturnsOutputs),
        {},
        r"train_step returned 'outputs' for each example",
    ),
    "no examples": (linear, {"x": X[:0], "y": Y[:0]}, r"x has no examples"),
    "no validation examples": (
        linear,
        {"validation_data": (X[:0], Y[:0])},
        r"validation_data has no examples",
    ),
    "sparse": (
        linear,
        {"x": lambda: tf.sparse.from_dense(X)},
        r"^x is sparse or ragged; give batches: tf\.data",
    ),
    "ragged": (linear, {"x": lambda: tf.RaggedTensor.from_tensor(X)}, r"^x is sparse or ragged"),
    "single examples": (
        linear,
        {"x": pairs, "y": None},
        r"x is a dataset of single examples: .* shape \(\); .*x\.batch",
    ),
    "shuffle": (linear, {"shuffle": "batch"}, r"shuffle='batch': give True"),
    "initial_epoch": (linear, {"initial_epoch": 1}, r"initial_epoch=1: .*leave it out"),
    "an unknown argument": (
        linear,
        {"fuse_step": 2},
        r"fit has no argument 'fuse_step'; did you mean fuse_steps\?",
    ),
    "epochs": (linear, {"epochs": "2"}, r"epochs='2' is not a whole number"),
    "validation_freq": (linear, {"validation_freq": 0}, r"validation_freq=0: .* at least 1"),
    "best by another metric": (
        lambda: linear(metrics=["accuracy"]),
        {"best": "val_acc"},
        r"best='val_acc': .*a callback adds.*ModelCheckpoint\(monitor.*did you mean val_accuracy",
    ),
    "best without validation": (
        linear,
        {"best": "val_loss", "validation_data": None},
        r"best='val_loss': there is no validation data",
    ),
}


def build_compiled(kind: type[keras.Sequential]) -> keras.Model:
    """Returns a model of a class, with one layer."""
    model = kind(DENSE)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_before_the_run(mistake: str, tmp_path: Path) -> None:
    build, changes, message = MISTAKES[mistake]
    options = {"x": X, "y": Y, "validation_data": (X, Y), **changes}
    if callable(options["x"]):
        options["x"] = options["x"]()

    with pytest.raises(UsageError, match=message):
        tk_keras.fit(build(), **options, model_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_limits_of_keras_for_trials_are_refused(tmp_path: Path) -> None:
    keras.config.set_max_epochs(2)
    try:
        with pytest.raises(UsageError, match=r"keras\.config limits the epochs"):
            tk_keras.fit(linear(), X, Y, epochs=5, verbose=0, model_dir=str(tmp_path))
    finally:
        keras.config.set_max_epochs(None)
