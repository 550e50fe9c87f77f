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

from tests.engine.compat.keras.keras_programs import Batches, X, Y, linear, pairs
from tests.engine.compat.keras.tf_keras_programs import tf_keras_linear
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


def test_steps_per_epoch_is_at_most_the_length(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"x": X, "y": Y, "batch_size": 20}
    data: tuple[dict[str, Any], ...] = (arrays, {"x": pairs().batch(20)}, {"x": Batches()})
    for arguments in data:
        assert build_training_data(**arguments, steps_per_epoch=7).steps_per_epoch == 5
    assert caplog.text.count("x has only 5 batches; as in Keras, an epoch ends with them") == 3

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


def shuffled_batches() -> tf.data.Dataset:
    """Returns ten batches, which are shuffled twice."""
    return pairs().shuffle(50, seed=1).batch(10).shuffle(2, seed=2)


def test_fits_and_processes_continue_the_orders_of_a_dataset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weighted: dict[str, Any] = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    expected = fit_losses("ours", shuffled_batches, epochs=3, model_dir=tmp_path / "a", **weighted)

    # Two fits of a process. The second one ends inside of the second epoch.
    keras.utils.set_random_seed(3)
    dataset = shuffled_batches()
    options: dict[str, Any] = {"model_dir": tmp_path / "b", **weighted}
    stopped: dict[str, Any] = {"checkpoint_interval": 3, "trainer": {"train_steps": 16}}
    fit_losses("ours", dataset, epochs=1, **options)
    fit_losses("ours", dataset, epochs=2, **stopped, **options)

    # A new process has a new dataset.
    assert fit_losses("ours", shuffled_batches, epochs=3, **options) == expected
    assert "is read again from the middle" not in caplog.text


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


def test_a_shuffled_py_dataset_is_read_from_any_position() -> None:
    class Numbered(Batches):
        """Batches whose features are their number."""

        def __getitem__(self, number: int) -> Any:
            return np.full((20, 8), number, "float32"), Y[:20]

    class_weight = {0: 1.0, 1: 2.0, 2: 0.5}
    passes = build_training_data(Numbered(), shuffle=True, class_weight=class_weight).batches
    orders = [[int(x[0, 0]) for x, _, _ in passes.at(position)] for position in (0, 5, 7)]
    _, _, weights = next(iter(passes.at(7)))
    passes.ends_with_pass = False
    across_passes = [int(x[0, 0]) for x, _, _ in passes.at(2).take(8)]

    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3, 4]
    assert orders[0] != orders[1] == [*orders[1][:2], *orders[2]]
    assert across_passes == [*orders[0][2:], *orders[1]]
    assert weights.numpy().tolist() == [class_weight[label] for label in Y[:20]]


# ---- a PyDataset that changes at the end of an epoch


class Level(keras.callbacks.Callback):
    """Has a value that changes when an epoch begins."""

    value = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.value = epoch


class Counting(keras.utils.PyDataset):
    """Four batches whose features are the number of ended epochs, with a tenth for each epoch that
    has begun, and a hundred for the level of a callback.
    """

    ended = begun = 0

    def __init__(self) -> None:
        super().__init__()
        self.level = Level()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        feature = self.ended + self.begun / 10 + 100 * self.level.value
        return np.full((2, 1), feature, "float32"), np.zeros((2, 1), "float32")

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
    def arguments(data: Counting) -> dict[str, Any]:
        options = {"validation_data": Counting(), "callbacks": [data.level], "verbose": 0}
        return {"x": data, "epochs": 4, **options}

    expected = mean_model().fit(**arguments(Counting())).history
    assert [round(value) for value in expected["loss"]] == [1, 102, 203, 304]
    assert [round(value) for value in expected["val_loss"]] == [1, 3, 5, 7]

    # Ends inside of the second epoch. The last fit finds a finished run.
    stopped = {"trainer": {"train_steps": 6, "checkpoint_interval": 2}}
    for options in (stopped, {}, {}):
        data = Counting()  # as in another process
        model_dir = str(tmp_path)
        ours = tk_keras.fit(mean_model(), **arguments(data), **options, model_dir=model_dir).history

    np.testing.assert_allclose(ours["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["val_loss"], expected["val_loss"], rtol=1e-6)
    # A later fit of the program may continue with the data.
    assert (data.begun, data.ended) == (4, 4)


def test_an_epoch_of_some_steps_ends_for_a_py_dataset() -> None:
    def read_features(epochs: Any, position: int) -> list[float]:
        return [float(x[0, 0]) for x, _ in epochs.at(position)]

    whole, resumed = (build_training_data(Counting(), steps_per_epoch=3).batches for _ in range(2))

    epochs = [read_features(whole, position) for position in (0, 3, 6)]
    np.testing.assert_allclose(epochs, [[1.1] * 3, [2.2] * 3, [3.3] * 3], rtol=1e-6)
    np.testing.assert_allclose(read_features(resumed, 7), [3.3] * 2, rtol=1e-6)
    begins = [whole.prepare_pass(position, has_iterator=True) for position in (0, 2, 3)]
    assert begins == [True, False, True]


# ---- evaluation


def test_steps_divide_validation_arrays_as_in_keras() -> None:
    batches = build_validation_data((X[:37], Y[:37]), steps=2)
    assert [len(y) for _, y in batches.at(0)] == [19, 18]


def test_each_evaluation_has_the_same_batches_of_a_generator() -> None:
    batches = build_validation_data(generate_numbered(9), steps=4)
    numbers = [[int(x[0, 0]) for x, _ in batches] for _ in range(2)]
    assert numbers == [[0, 1, 2, 3]] * 2


# ---- random numbers in Python


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

    resumptions = [
        build_training_data(data).batches.resumption(deterministic_ops=False)
        for data in (from_random, from_index)
    ]
    assert resumptions[0].method == "inexact"
    assert resumptions[1] is None

    message = r"draws from the global state.* draw from np\.random\.default_rng"
    exact = {"require_exact_resume": True}
    with pytest.raises(UsageError, match=message):
        fit_losses("ours", from_numpy, model_dir=tmp_path / "exact", trainer=exact)

    fit_losses("ours", from_numpy, model_dir=tmp_path / "numpy", epochs=2)
    assert caplog.text.count("draws from the global state of random or np.random") == 1
