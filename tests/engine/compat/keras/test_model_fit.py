"""fit has the numbers of Model.fit, in a folder that a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas as replicas_of
from tests.engine.compat.keras.keras_programs import (
    X,
    Y,
    assert_same_history,
    linear,
    pairs,
    tf_keras_linear,
)
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError


def test_epochs_of_another_length_are_refused(tmp_path: Path) -> None:
    tk_keras.fit(linear(), X, Y, epochs=1, verbose=0, model_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"has 4 steps, and .* it has 2; give the data of the run"):
        tk_keras.fit(linear(), X[:50], Y[:50], epochs=2, verbose=0, model_dir=str(tmp_path))

    allowed = ["trainer.steps_per_epoch", "task.train_data.identity"]
    options = {"epochs": 3, "verbose": 0, "allow_config_change": allowed}
    again = tk_keras.fit(linear(), X[:50], Y[:50], model_dir=str(tmp_path), **options)

    assert again.model.optimizer.iterations == 6


def test_shuffled_validation_data_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def halves(reshuffles: bool) -> tuple[tf.data.Dataset, tf.data.Dataset]:
        examples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(
            100, 3, reshuffle_each_iteration=reshuffles
        )
        return examples.take(60).batch(20), examples.skip(60).batch(20)

    def fit(name: str, data: Any, **options: Any) -> None:
        train, validation = data
        folder = str(tmp_path / name)
        tk_keras.fit(
            linear(), train, validation_data=validation, verbose=0, model_dir=folder, **options
        )

    exact = {"trainer": {"require_exact_resume": True}, "epochs": 1}
    reshuffled = halves(reshuffles=True)
    message = r"validation_data: shuffle\(\) draws another order in each evaluation"
    with pytest.raises(UsageError, match=message):
        fit("a", reshuffled, **exact)

    fit("b", reshuffled, epochs=2)
    assert caplog.text.count("validation_data: shuffle() draws another order") == 1

    caplog.clear()
    fit("c", halves(reshuffles=False), **exact)
    assert "validation_data" not in caplog.text


def test_shuffled_arrays_of_tf_keras_resume_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = {"require_exact_resume": True}
    tk_keras.fit(
        tf_keras_linear(), X, Y, epochs=1, verbose=0, model_dir=str(tmp_path), trainer=exact
    )
    assert "resume is not exact" not in caplog.text


class _Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(25 * index, 25 * index + 25)
        return X[rows], Y[rows]


@pytest.mark.parametrize("begins_with_a_dataset", [True, False])
def test_a_run_goes_on_with_data_of_another_kind(
    begins_with_a_dataset: bool, tmp_path: Path
) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=3).batch(25)
    data: list[Any] = [dataset, _Batches()]
    if not begins_with_a_dataset:
        data.reverse()
    first, second = data

    tk_keras.fit(linear(), first, epochs=1, verbose=0, model_dir=str(tmp_path))
    history = tk_keras.fit(linear(), second, epochs=2, verbose=0, model_dir=str(tmp_path))
    assert history.epoch == [0, 1]


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


def test_folds_that_share_a_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit_fold(held_out: slice, **options: Any) -> Any:
        rest = np.delete(np.arange(100), held_out)
        of_fold = X[held_out], Y[held_out]
        return tk_keras.fit(
            linear(),
            X[rest],
            Y[rest],
            epochs=1,
            verbose=0,
            validation_data=of_fold,
            model_dir=str(tmp_path),
            **options,
        )

    fit_fold(slice(0, 50))
    fit_fold(slice(0, 50))
    assert "nothing to do: the run in" in capsys.readouterr().out
    message = r"task\.train_data: .*\n.*task\.validation_data: the data has changed"

    with pytest.raises(UsageError, match=message):
        fit_fold(slice(50, 100))
    allowed = ["task.train_data.identity", "task.validation_data.identity"]
    assert fit_fold(slice(50, 100), allow_config_change=allowed).model.optimizer.iterations == 2


def test_other_validation_labels_are_refused(tmp_path: Path) -> None:
    tk_keras.fit(
        linear(), X, Y, epochs=1, verbose=0, validation_data=(X, Y), model_dir=str(tmp_path)
    )

    options = {"epochs": 2, "verbose": 0, "validation_data": (X, Y[::-1])}
    with pytest.raises(UsageError, match=r"^task\.validation_data: .*: array 1 was int64 \[100\]"):
        tk_keras.fit(linear(), X, Y, model_dir=str(tmp_path), **options)


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_may_need_the_size_of_a_batch(replicas: int, tmp_path: Path) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20, drop_remainder=True)
    histories = []
    for folder in ({}, {"model_dir": str(tmp_path)}):
        with replicas_of(replicas).scope():
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
    "best by a near name": (
        linear,
        {"best": "val_acc"},
        r"best='val_acc': .*did you mean val_accuracy",
    ),
    "best by another metric": (
        linear,
        {"best": "val_auc"},
        r"best='val_auc': .*a callback adds.*ModelCheckpoint\(monitor",
    ),
    "best by a training metric": (
        linear,
        {"best": "accuracy"},
        r"best='accuracy': .*did you mean val_accuracy",
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
