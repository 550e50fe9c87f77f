"""Predictions: rows in their order, files of each kind, and parts that a killed one continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

import trainer_kit
from trainer_kit.errors import UsageError
from trainer_kit.serving import prediction
from trainer_kit.serving.prediction_files import PredictionParts

ROWS = np.random.default_rng(0).random((70, 3)).astype("float32")
KEYS = np.arange(70) * 2


@pytest.fixture(scope="module")
def model() -> keras.Model:
    inputs = keras.Input((3,), name="x")
    return keras.Model(inputs, keras.layers.Dense(2)(inputs))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of ten rows are a part."""
    monkeypatch.setattr(prediction, "_PART_BATCHES", 3)


READERS: dict[str, Callable[[Path], tuple[np.ndarray, list[Any]]]] = {
    ".npz": lambda path: (np.load(path)["outputs"], np.load(path)["key"].tolist()),
    ".jsonl": lambda path: (
        np.array([json.loads(line)["outputs"] for line in path.read_text().splitlines()]),
        [json.loads(line)["key"] for line in path.read_text().splitlines()],
    ),
    ".csv": lambda path: (
        pandas.read_csv(path)[["outputs_0", "outputs_1"]].to_numpy(),
        pandas.read_csv(path)["key"].tolist(),
    ),
    ".parquet": lambda path: (
        np.stack(pandas.read_parquet(path)["outputs"].to_numpy()),
        pandas.read_parquet(path)["key"].tolist(),
    ),
}


@pytest.mark.parametrize("suffix", READERS)
def test_rows_are_written_in_their_order(model: keras.Model, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"

    trainer_kit.predict(model, {"x": ROWS, "key": KEYS}, path, batch_size=10)

    outputs, keys = READERS[suffix](path)
    np.testing.assert_allclose(outputs, model(ROWS), rtol=1e-5)
    assert keys == KEYS.tolist()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_without_an_output_the_columns_are_returned(model: keras.Model) -> None:
    columns = trainer_kit.predict(model, ROWS, batch_size=32)

    np.testing.assert_allclose(columns["outputs"], model(ROWS), rtol=1e-5)


def test_a_sequential_model_takes_a_file(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    np.savez(tmp_path / "in.npz", inputs=ROWS)

    columns = trainer_kit.predict(model, tmp_path / "in.npz")

    np.testing.assert_allclose(columns["outputs"], model(ROWS), rtol=1e-5)


def test_a_killed_prediction_computes_the_missing_parts(
    model: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.npz"
    write = PredictionParts.write
    written: list[int] = []

    def write_two(self: PredictionParts, number: int, columns: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        write(self, number, columns)

    monkeypatch.setattr(PredictionParts, "write", write_two)
    with pytest.raises(KeyboardInterrupt):
        trainer_kit.predict(model, {"x": ROWS}, path, batch_size=10)
    assert written == [0, 1]

    def write_all(self: PredictionParts, number: int, columns: Any) -> None:
        written.append(number)
        write(self, number, columns)

    monkeypatch.setattr(PredictionParts, "write", write_all)
    trainer_kit.predict(model, {"x": ROWS}, path, batch_size=10)
    assert written == [0, 1, 2]

    np.testing.assert_allclose(np.load(path)["outputs"], model(ROWS), rtol=1e-5)


def test_parts_of_another_prediction_are_not_merged(model: keras.Model, tmp_path: Path) -> None:
    path = tmp_path / "out.npz"
    trainer_kit.predict(model, {"x": ROWS}, path, batch_size=10, worker=1, workers=2)

    trainer_kit.predict(model, {"x": ROWS + 1}, path, batch_size=10)

    np.testing.assert_allclose(np.load(path)["outputs"], model(ROWS + 1), rtol=1e-5)


def test_random_states_of_a_model_do_not_change_its_parts(tmp_path: Path) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), name="x")
        # It has a random state of its own in each process.
        dropout = keras.layers.Dropout(0.5, seed=int(np.random.default_rng().integers(1000)))
        return keras.Model(inputs, keras.layers.Dense(2)(dropout(inputs)))

    for worker in (1, 0):
        path = tmp_path / "out.npz"
        trainer_kit.predict(build(), ROWS, path, batch_size=10, worker=worker, workers=2)

    assert [file.name for file in tmp_path.iterdir()] == ["out.npz"]


def test_two_workers_share_the_parts(model: keras.Model, tmp_path: Path) -> None:
    path = tmp_path / "out.npz"

    trainer_kit.predict(model, {"x": ROWS}, path, batch_size=10, worker=1, workers=2)
    parts = sorted(file.name for file in tmp_path.glob("out.npz.parts-*/part-*"))
    assert parts == ["part-000001.npz"]
    trainer_kit.predict(model, {"x": ROWS}, path, batch_size=10, worker=0, workers=2)

    np.testing.assert_allclose(np.load(path)["outputs"], model(ROWS), rtol=1e-5)


def test_two_replicas_share_each_batch(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
    )
    with strategy.scope():
        inputs = keras.Input((3,), name="x")
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))

    # The last batch has a single row.
    columns = trainer_kit.predict(model, ROWS[:33], batch_size=16, strategy=strategy)

    np.testing.assert_allclose(columns["outputs"], model(ROWS[:33]), rtol=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_a_file_is_read_by_the_names_of_its_columns(
    model: keras.Model, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"in{suffix}"
    table = pandas.DataFrame({f"x_{index}": ROWS[:, index] for index in range(3)})
    table["key"] = KEYS
    if suffix == ".csv":
        table.to_csv(path, index=False)
    elif suffix == ".parquet":
        pandas.DataFrame({"x": list(ROWS), "key": KEYS}).to_parquet(path)
    else:
        np.savez(path, x=ROWS, key=KEYS)

    columns = trainer_kit.predict(model, path, batch_size=32)

    np.testing.assert_allclose(columns["outputs"], model(ROWS), rtol=1e-4)
    keys = [int(key) for key in columns["key"]]
    assert keys == KEYS.tolist()


def test_a_folder_of_images_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, value in (("b/2.png", 2), ("a/1.png", 1), ("c.png", 3)):
        image = tf.fill([8, 6, 3], tf.constant(value * 10, tf.uint8))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tf.io.write_file(str(tmp_path / name), tf.io.encode_png(image))
    inputs = keras.Input((4, 4, 3), name="image")
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(inputs))

    trainer_kit.predict(model, tmp_path, tmp_path / "out.jsonl")

    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    # The images of a folder come before those of its subfolders.
    assert [row["file"] for row in rows] == ["c.png", "a/1.png", "b/2.png"]
    assert [row["outputs"][0] for row in rows] == [30, 10, 20]


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".csv", ".parquet"])
def test_outputs_may_be_texts(tmp_path: Path, suffix: str) -> None:
    class Upper(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = tf.Variable(0.0)

        def __call__(self, texts: tf.Tensor, training: bool = False) -> tf.Tensor:
            return tf.strings.upper(texts)

    texts = np.array([b"a", b"bcd"])

    trainer_kit.predict(Upper(), texts, tmp_path / f"out{suffix}")

    if suffix == ".npz":
        assert np.load(tmp_path / "out.npz")["outputs"].tolist() == [b"A", b"BCD"]
    elif suffix == ".parquet":
        assert pandas.read_parquet(tmp_path / "out.parquet")["outputs"].tolist() == ["A", "BCD"]
    else:
        text = (tmp_path / f"out{suffix}").read_text()
        assert "A" in text and "BCD" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.npz", b"no zip"),
        ("in.csv", b""),
        ("in.csv", b"x_0,x_1,x_2\n1,2,three\n"),
        ("in.csv", b"x_0,x_1,x_2\n"),
        ("in.npz", b""),
        ("in.parquet", b"no parquet"),
    ],
)
def test_a_damaged_file_is_one_line(
    model: keras.Model, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UsageError, match="input: "):
        trainer_kit.predict(model, tmp_path / name)


def test_missing_values_of_a_parquet_file_are_refused(model: keras.Model, tmp_path: Path) -> None:
    table = pandas.DataFrame({"x": list(ROWS), "key": [None, *KEYS[1:]]})
    table.to_parquet(tmp_path / "in.parquet")

    with pytest.raises(UsageError, match=r"'key'. have missing values"):
        trainer_kit.predict(model, tmp_path / "in.parquet")


def test_numbers_that_an_input_cannot_contain_are_refused() -> None:
    inputs = keras.Input((), name="x", dtype="int32")
    model = keras.Model(inputs, keras.layers.Identity()(inputs))

    with pytest.raises(UsageError, match="values of int64 that do not fit the int32"):
        trainer_kit.predict(model, {"x": np.array([2**40])})


def test_a_dataset_is_refused(model: keras.Model) -> None:
    with pytest.raises(UsageError, match="give arrays"):
        trainer_kit.predict(model, tf.data.Dataset.from_tensors(ROWS))


def test_an_output_without_rows_is_refused() -> None:
    class Total(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = tf.Variable(0.0)

        def __call__(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
            return tf.reduce_sum(inputs)

    with pytest.raises(UsageError, match=r"shape \[\] for 32 rows"):
        trainer_kit.predict(Total(), ROWS)


def test_a_feature_called_label_is_not_replaced(tmp_path: Path) -> None:
    inputs = keras.Input((1,), name="label", dtype="int32")
    model = keras.Model({"label": inputs}, keras.layers.Identity(name="same")(inputs))

    columns = trainer_kit.predict(model, {"label": np.array([[7], [8]])})

    assert columns["outputs"].tolist() == [[7], [8]]


def test_numbers_of_a_csv_file_have_the_type_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("x,key\n200,7\n3,a\n")
    inputs = keras.Input((), name="x", dtype="uint8")
    model = keras.Model(inputs, keras.layers.Identity()(inputs))

    columns = trainer_kit.predict(model, tmp_path / "in.csv")

    assert columns["outputs"].tolist() == [200, 3]
    assert columns["key"].tolist() == [b"7", b"a"]


def test_an_empty_cell_of_a_csv_file_is_nan(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("area,rooms\n1.5,2\n,3\n")
    inputs = [keras.Input((), name="area"), keras.Input((), name="rooms")]
    model = keras.Model(inputs, keras.layers.Add()(inputs))

    columns = trainer_kit.predict(model, tmp_path / "in.csv")

    assert np.array_equal(columns["outputs"], [3.5, np.nan], equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "out.txt"}, "is no file that ends with .jsonl, .csv, .parquet, .npz"),
        ({"data": "nothing.npz"}, "there is no file nothing.npz"),
        ({"data": {"y": ROWS}}, "the columns are y; the model takes 'x' of shape .* x_0 to x_2"),
        (
            {"data": {"x": ROWS[:, :2]}},
            r"'x' has the shape \[2\] in a row, and the model takes \[3\]",
        ),
        ({"data": {"x": ROWS, "key": KEYS[:3]}}, "the arrays have different lengths"),
        ({"data": {"x": ROWS[:0]}}, "the data has no row"),
        ({"data": {f"x_{index}": ROWS[:, 0] for index in range(4)}}, "the model takes 'x'"),
        ({"data": {"x": ROWS, "key": np.array([{}] * 70)}}, "neither numbers nor texts"),
        ({"data": {"x": ROWS, "outputs": KEYS}}, "'outputs' has the name of an output"),
        ({"data": {"x": ROWS, "outputs_0": KEYS}, "output": "o.csv"}, "two columns are called"),
        ({"workers": 2}, "several workers and evaluate need an output"),
    ],
)
def test_mistakes_are_one_line(
    model: keras.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        trainer_kit.predict(model, **{"data": ROWS, **arguments})


def test_texts_of_several_parts_get_one_dtype(tmp_path: Path) -> None:
    parts = PredictionParts(str(tmp_path / "out.npz"), {})
    for number in range(3):
        parts.write(number, {"name": np.array(["a" * (number + 1)]), "value": np.ones((1, 2))})

    parts.merge(3)

    columns = np.load(tmp_path / "out.npz")
    assert columns["name"].tolist() == ["a", "aa", "aaa"]
    assert columns["value"].shape == (3, 2)
