"""fit has the numbers of Model.fit, in a folder that a run goes on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.compat.keras.keras_programs import of_tf_keras
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(100, 8), RANDOM.randint(0, 3, 100)


def classifier(**options: Any) -> keras.Model:
    """Returns a compiled model whose weights, masks and orders come from one seed."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA, which Keras takes by default, would double the time of a test.
    given = {"optimizer": "sgd", "loss": loss, "jit_compile": False, **options}
    model.compile(**given)
    return model


def assert_same(history: Any, expected: Any) -> None:
    """Checks that two histories have the same names and, to 1e-6, the same values."""
    assert history.history.keys() == expected.history.keys()
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


def test_epochs_of_another_length_are_refused(tmp_path: Path) -> None:
    tk_keras.fit(classifier(), X, Y, epochs=1, verbose=0, model_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"has 4 steps, and .* it has 2; give the data of the run"):
        tk_keras.fit(classifier(), X[:50], Y[:50], epochs=2, verbose=0, model_dir=str(tmp_path))
    allowed = ["trainer.steps_per_epoch", "task.train_data.identity"]
    again = tk_keras.fit(
        classifier(), X[:50], Y[:50], epochs=3, verbose=0, model_dir=str(tmp_path), allow_config_change=allowed
    )
    assert again.model.optimizer.iterations == 6


def test_shuffled_validation_data_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def halves(reshuffles: bool) -> tuple[tf.data.Dataset, tf.data.Dataset]:
        examples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, 3, reshuffle_each_iteration=reshuffles)
        return examples.take(60).batch(20), examples.skip(60).batch(20)

    exact = {"trainer": {"require_exact_resume": True}, "epochs": 1, "verbose": 0}
    train, validation = halves(reshuffles=True)
    with pytest.raises(UsageError, match=r"validation_data: shuffle\(\) draws another order in each evaluation"):
        tk_keras.fit(classifier(), train, validation_data=validation, model_dir=str(tmp_path / "a"), **exact)
    tk_keras.fit(classifier(), train, validation_data=validation, epochs=2, verbose=0, model_dir=str(tmp_path / "b"))
    assert caplog.text.count("validation_data: shuffle() draws another order") == 1
    caplog.clear()
    train, validation = halves(reshuffles=False)
    tk_keras.fit(classifier(), train, validation_data=validation, model_dir=str(tmp_path / "c"), **exact)
    assert "validation_data" not in caplog.text


def test_shuffled_arrays_of_tf_keras_resume_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = {"require_exact_resume": True}
    tk_keras.fit(of_tf_keras(), X, Y, epochs=1, verbose=0, model_dir=str(tmp_path), trainer=exact)
    assert "resume is not exact" not in caplog.text


class _Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(25 * index, 25 * index + 25)
        return X[rows], Y[rows]


@pytest.mark.parametrize("begins_with_a_dataset", [True, False])
def test_a_run_goes_on_with_data_of_another_kind(begins_with_a_dataset: bool, tmp_path: Path) -> None:
    data: list[Any] = [tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100, seed=3).batch(25), _Batches()]
    first, second = data if begins_with_a_dataset else reversed(data)
    tk_keras.fit(classifier(), first, epochs=1, verbose=0, model_dir=str(tmp_path))
    history = tk_keras.fit(classifier(), second, epochs=2, verbose=0, model_dir=str(tmp_path))
    assert history.epoch == [0, 1]


def test_a_fit_stays_in_its_folder_after_os_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    leave = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: os.chdir(tmp_path / "other"))
    first = tk_keras.fit(classifier(), X, Y, epochs=2, verbose=0, model_dir="run", callbacks=[leave])
    assert os.listdir("../other") == []
    monkeypatch.chdir(tmp_path)
    again = tk_keras.fit(classifier(), X, Y, epochs=2, verbose=0, model_dir="run")
    assert_same(again, first)
    assert again.model.optimizer.iterations == 8


def test_folds_that_share_a_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit_fold(held_out: slice, **options: Any) -> Any:
        rest = np.delete(np.arange(100), held_out)
        of_fold = X[held_out], Y[held_out]
        return tk_keras.fit(
            classifier(), X[rest], Y[rest], epochs=1, verbose=0, validation_data=of_fold, model_dir=str(tmp_path),
            **options,
        )  # fmt: skip

    fit_fold(slice(0, 50))
    fit_fold(slice(0, 50))
    assert "nothing to do: the run in" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"task\.train_data: .*\n.*task\.validation_data: the data has changed"):
        fit_fold(slice(50, 100))
    allowed = ["task.train_data.identity", "task.validation_data.identity"]
    assert fit_fold(slice(50, 100), allow_config_change=allowed).model.optimizer.iterations == 2


def test_other_validation_labels_are_refused(tmp_path: Path) -> None:
    tk_keras.fit(classifier(), X, Y, epochs=1, verbose=0, validation_data=(X, Y), model_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"^task\.validation_data: .*: array 1 was int64 \[100\]"):
        tk_keras.fit(classifier(), X, Y, epochs=2, verbose=0, validation_data=(X, Y[::-1]), model_dir=str(tmp_path))


class AddsMean(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(inputs))
        return inputs


def test_a_model_without_variables_is_fitted(tmp_path: Path) -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, AddsMean()(inputs))
    model.compile("adam", jit_compile=False)
    history = tk_keras.fit(model, X, Y, epochs=2, verbose=0, model_dir=str(tmp_path))
    assert_same(history, model.fit(X, Y, epochs=2, verbose=0))


class ReturnsLoss(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return self.compute_loss(y=data[1], y_pred=self(data[0]))


class StaticSize(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        targets = np.zeros((data[0].shape[0], 3), "float32")  # a dataset that drops the remainder tells the size
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
        devices = ["CPU:0", "CPU:1"][:replicas]
        with tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice()).scope():
            model = StaticSize([keras.Input((8,)), keras.layers.Dense(3, kernel_initializer="ones")])
            model.compile("sgd", jit_compile=False)
        door = tk_keras.fit if folder else keras.Model.fit
        histories.append(door(model, dataset, epochs=2, verbose=0, **folder))
    assert_same(histories[1], histories[0])


class ReturnsOutputs(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {"loss": 0.0, "outputs": self(data[0])}


def test_limits_of_keras_for_trials_are_refused(tmp_path: Path) -> None:
    model = classifier()
    keras.config.set_max_epochs(2)
    try:
        with pytest.raises(UsageError, match=r"keras\.config limits the epochs"):
            tk_keras.fit(model, X, Y, epochs=5, verbose=0, model_dir=str(tmp_path))
    finally:
        keras.config.set_max_epochs(None)


def _not_compiled() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])


def _without_optimizer() -> keras.Model:
    return classifier(optimizer=None)


def _returns_loss() -> keras.Model:
    model = ReturnsLoss([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def _returns_outputs() -> keras.Model:
    model = ReturnsOutputs([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("build", "given", "message"),
    [
        (_not_compiled, {}, r"is not compiled; call model\.compile"),
        (_without_optimizer, {}, r"compiled without an optimizer.*optimizer=\"adam\""),
        (
            _returns_loss,
            {"validation_data": (X, Y)},
            r"test_step returned a SymbolicTensor.* return \{\"loss\": loss\}",
        ),
        (_returns_outputs, {}, r"train_step returned 'outputs' for each example; return numbers only"),
        (classifier, {"x": X[:0], "y": Y[:0]}, r"x has no examples"),
        (classifier, {"validation_data": (X[:0], Y[:0])}, r"validation_data has no examples"),
        (classifier, {"shuffle": "batch"}, r"shuffle='batch': give True"),
        (classifier, {"initial_epoch": 1}, r"initial_epoch=1: .*leave it out"),
        (classifier, {"fuse_step": 2}, r"fit has no argument 'fuse_step'; did you mean fuse_steps\?"),
    ],
)
def test_a_mistake_is_told(build: Any, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        tk_keras.fit(build(), **{"x": X, "y": Y, **given}, model_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_sparse_and_ragged_arrays_are_refused(tmp_path: Path) -> None:
    sparse, ragged = tf.sparse.from_dense(X), tf.RaggedTensor.from_tensor(X)
    with pytest.raises(UsageError, match=r"^x is sparse or ragged; give batches: tf\.data"):
        tk_keras.fit(classifier(), sparse, Y, model_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"^validation_data is sparse or ragged"):
        tk_keras.fit(classifier(), X, Y, validation_data=(ragged, Y), model_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
