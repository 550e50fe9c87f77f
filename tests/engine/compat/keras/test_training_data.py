"""What fit and evaluate read: the batches of Keras, in its orders, from any position on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.compat.keras.keras_programs import (
    Batches,
    Changing,
    X,
    Y,
    linear,
    pairs,
    tf_keras_linear,
)
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.training_data import build_training_data, build_validation_data
from trainer_kit.errors import DataError, UsageError


def fit_losses(
    door: str, x: Any, *, model_dir: Path | str = "", build: Any = linear, **options: Any
) -> list[float]:
    """Returns the losses of a fit of Keras or of trainer_kit with the same seed; x may be a
    function.
    """
    keras.utils.set_random_seed(3)
    if callable(x):
        x = x()
    options = {"verbose": 0, **options}
    model = build()
    if door == "keras":
        history = model.fit(x, **options)
    else:
        history = tk_keras.fit(model, x, model_dir=str(model_dir), **options)
    return [float(loss) for loss in history.history["loss"]]


# ---- the length of an epoch


def test_an_epoch_ends_with_arrays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"y": Y, "batch_size": 20, "steps_per_epoch": 7, "epochs": 2}
    ours = fit_losses("ours", X, model_dir=tmp_path, **options)

    np.testing.assert_allclose(ours, fit_losses("keras", X, **options), rtol=1e-6)
    assert caplog.text.count("an epoch ends with them") == 1


def test_steps_per_epoch_is_at_most_the_length(caplog: pytest.LogCaptureFixture) -> None:
    for x in (pairs().batch(20), Batches()):
        assert build_training_data(x, steps_per_epoch=7).steps_per_epoch == 5
    assert build_training_data(pairs().batch(10), steps_per_epoch=4).steps_per_epoch == 4
    assert "does not divide the 10 batches" in caplog.text


def generate_numbered(count: int) -> Iterator[Any]:
    """Yields batches whose features are their number."""
    for number in range(count):
        yield np.full((4, 8), number, "float32"), np.zeros(4, "int32")


def test_a_generator_that_ends_early_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ended at step 5 of 6"):
        fit_losses("ours", generate_numbered(5), model_dir=tmp_path, steps_per_epoch=3, epochs=2)


# ---- orders


@pytest.mark.parametrize("build", [linear, tf_keras_linear])
def test_each_pass_begins_random_ops_and_shuffles_as_keras(build: Any, tmp_path: Path) -> None:
    def build_dataset() -> tf.data.Dataset:
        noisy = (
            pairs()
            .shuffle(100, seed=1)
            .batch(20)
            .map(lambda x, y: (x + tf.random.uniform([8], seed=4), y))
        )
        return noisy.shuffle(3, seed=2)

    ours = fit_losses("ours", build_dataset, model_dir=tmp_path, build=build, epochs=3)
    np.testing.assert_allclose(
        ours, fit_losses("keras", build_dataset, build=build, epochs=3), rtol=1e-6
    )


WEIGHTED = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def shuffled_batches() -> tf.data.Dataset:
    """Returns ten batches, which are shuffled twice."""
    return pairs().shuffle(50, seed=1).batch(10).shuffle(2, seed=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a fit of three epochs that nothing interrupts."""
    return fit_losses(
        "ours", shuffled_batches, epochs=3, model_dir=tmp_path_factory.mktemp("whole"), **WEIGHTED
    )


def test_two_fits_read_a_dataset_as_one(
    whole: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keras.utils.set_random_seed(3)
    dataset = shuffled_batches()
    fit_losses("ours", dataset, epochs=1, model_dir=tmp_path, **WEIGHTED)

    assert fit_losses("ours", dataset, epochs=3, model_dir=tmp_path, **WEIGHTED) == whole
    assert "is read again from the middle" not in caplog.text


def test_a_new_process_draws_the_orders_of_the_first(whole: list[float], tmp_path: Path) -> None:
    # Ends inside of the second epoch.
    interval = {"checkpoint_interval": 3, "trainer": {"train_steps": 16}}
    fit_losses("ours", shuffled_batches, epochs=2, model_dir=tmp_path, **interval, **WEIGHTED)
    assert fit_losses("ours", shuffled_batches, epochs=3, model_dir=tmp_path, **WEIGHTED) == whole


def test_a_shuffled_dataset_is_read_once_an_epoch(tmp_path: Path) -> None:
    read = []

    def note_example(x: Any, y: Any) -> Any:
        read.append(1)
        return x, y

    mapped = pairs().map(
        lambda x, y: tf.numpy_function(note_example, [x, y], [tf.float32, tf.int64])
    )
    shaped = mapped.map(lambda x, y: (tf.ensure_shape(x, [8]), tf.ensure_shape(y, [])))
    fit_losses("ours", shaped.shuffle(60, seed=1).batch(20), epochs=3, model_dir=tmp_path)
    assert len(read) == 300


def test_a_shuffled_py_dataset_resumes_inside_a_pass(tmp_path: Path) -> None:
    class Numbered(Batches):
        """Batches whose features are their number."""

        def __getitem__(self, number: int) -> Any:
            return np.full((20, 8), number, "float32"), Y[:20]

    options = {"shuffle": True, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    passes = build_training_data(Numbered(), shuffle=True).batches
    orders = [[int(x[0, 0]) for x, _ in passes.at(position)] for position in (0, 5, 7)]
    passes.ends_with_pass = False
    assert [int(x[0, 0]) for x, _ in passes.at(2).take(8)] == [*orders[0][2:], *orders[1]]
    assert orders[0] != orders[1] == [*orders[1][:2], *orders[2]]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3, 4]

    expected = fit_losses("ours", Numbered(), model_dir=tmp_path / "a", epochs=3, **options)
    # Ends inside of the second epoch.
    stopped = {"checkpoint_interval": 3, "trainer": {"train_steps": 8}}
    fit_losses("ours", Numbered(), model_dir=tmp_path / "b", epochs=3, **stopped, **options)
    assert fit_losses("ours", Numbered(), model_dir=tmp_path / "b", epochs=3, **options) == expected


# ---- a PyDataset that changes at the end of an epoch


class Counting(keras.utils.PyDataset):
    """Four batches whose features are the number of ended epochs, and with a tenth for each epoch
    that has begun.
    """

    ended = begun = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return np.full((2, 1), self.ended + self.begun / 10, "float32"), np.zeros((2, 1), "float32")

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1


def mean_model() -> Any:
    """Returns a model whose loss is the mean of the features, and which never changes."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(
        keras.optimizers.SGD(0.0), lambda _, outputs: tf.reduce_mean(outputs), jit_compile=False
    )
    return model


def test_a_py_dataset_changes_where_keras_changes_it(tmp_path: Path) -> None:
    options = {"verbose": 0, "validation_data": Counting()}
    expected = mean_model().fit(Counting(), epochs=4, **options).history

    assert [round(value) for value in expected["val_loss"]] == [1, 3, 5, 7]

    for epochs in (1, 3, 4):  # each with a dataset of its own, as in another process
        options["validation_data"] = Counting()
        ours = tk_keras.fit(
            mean_model(), Counting(), epochs=epochs, model_dir=str(tmp_path), **options
        ).history
    np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["val_loss"], expected["val_loss"], rtol=1e-6)


def test_an_epoch_of_some_steps_ends_for_a_py_dataset(tmp_path: Path) -> None:
    for epochs in (2, 5):
        options = {"epochs": epochs, "steps_per_epoch": 3, "verbose": 0, "model_dir": str(tmp_path)}
        history = tk_keras.fit(mean_model(), Counting(), **options).history
    np.testing.assert_allclose(history["loss"], [1.1, 2.2, 3.3, 4.4, 5.5], rtol=1e-6)


# ---- evaluation


def test_steps_divide_validation_arrays_as_in_keras() -> None:
    batches = build_validation_data((X[:37], Y[:37]), steps=2)
    assert [len(y) for _, y in batches.at(0)] == [19, 18]


def test_each_evaluation_has_the_same_batches_of_a_generator() -> None:
    batches = build_validation_data(generate_numbered(9), steps=4)
    numbers = [[int(x[0, 0]) for x, _ in batches] for _ in range(2)]
    assert numbers == [[0, 1, 2, 3]] * 2


# ---- random numbers in Python


def test_a_finished_fit_begins_the_epochs_of_a_py_dataset(tmp_path: Path) -> None:
    first = Changing()
    later = Changing()
    for data in (first, later):
        fit_losses("ours", data, model_dir=tmp_path, epochs=2)

    assert (later.begun, later.ended) == (first.begun, first.ended) == (2, 2)


class Drawn(Batches):
    """Batches whose examples a function chooses."""

    def __init__(self, choose: Callable[[int], Any]) -> None:
        super().__init__()
        self._choose = choose

    def __getitem__(self, index: int) -> Any:
        rows = self._choose(index)
        return X[rows], Y[rows]


def test_a_py_dataset_with_global_random_state_is_not_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from_random = Drawn(lambda _: random.choices(range(100), k=20))
    from_numpy = Drawn(lambda _: np.random.randint(0, 100, 20))
    from_index = Drawn(lambda index: np.random.default_rng((1, index)).integers(0, 100, 20))
    exact = {"epochs": 1, "trainer": {"require_exact_resume": True}}

    message = r"draws from the global state.* draw from np\.random\.default_rng"
    for data in (from_random, from_numpy):
        with pytest.raises(UsageError, match=message):
            fit_losses("ours", data, model_dir=tmp_path / "exact", **exact)

    fit_losses("ours", from_numpy, model_dir=tmp_path / "numpy", epochs=2)
    assert caplog.text.count("draws from the global state of random or np.random") == 1

    assert fit_losses("ours", from_index, model_dir=tmp_path / "index", **exact)
