"""The inputs of a prediction: a run's validation data, TFRecords, arrays, tables or images."""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import DataError, UsageError, suggest_paths
from trainer_kit.inputs.dataset_structure import is_infinite
from trainer_kit.serving.export_formats import import_runtime
from trainer_kit.serving.inference_function import InferenceFunction, to_array
from trainer_kit.serving.model_loading import LoadedRun
from trainer_kit.serving.validation_examples import build_validation_dataset
from trainer_kit.training.checks.batch_spec import select_features

# The columns of a batch by name: arrays, and tensors where they come from a dataset.
Batch = Mapping[str, Any]
# Keras's color mode by the number of channels.
_COLOR_MODES = {1: "grayscale", 3: "rgb", 4: "rgba"}


@dataclass(frozen=True)
class PredictionInputs:
    """Batches in the order of the data.

    Attributes:
      identity: What the data is, in JSON types.
      read_batches: Returns the batches after a number of them.
      batch_count: The number of batches. None if it is not known.
    """

    identity: Any
    read_batches: Callable[[int], Iterator[Batch]]
    batch_count: int | None = None


def open_inputs(
    data: Any, run: LoadedRun | None, inference: InferenceFunction, batch_size: int
) -> PredictionInputs:
    """Returns the batches of `data`. See `trainer_kit.predict`.

    Raises:
      UsageError: When the data does not exist.
    """
    if is_read_by_task(data):
        if run is None:
            raise UsageError("predict: a model needs data; give arrays, or the path of a file")
        return _open_validation_data(run, inference, data)
    if not isinstance(data, (str, os.PathLike)):
        if isinstance(data, tf.data.Dataset):
            raise UsageError("data: a tf.data.Dataset has no places to continue at; give arrays")
        is_named = isinstance(data, Mapping)
        arrays = data if is_named else inference.name_features(data)
        return _slice_arrays(arrays, batch_size)

    path = Path(data)
    if path.is_dir():
        return _open_images(path, inference, batch_size)
    if not path.exists():
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        raise UsageError(f"input: there is no file {path}; {suggest_paths(path, names, 'files')}")
    if path.suffix == ".npz":
        with _explain_read_errors(path), np.load(path) as file:
            arrays = dict(file)
        return _slice_arrays(arrays, batch_size)
    if path.suffix in (".csv", ".parquet"):
        return _open_table(path, batch_size)
    raise UsageError(
        f"input: {path} has an unsupported suffix; give a .npz, .csv or .parquet file, files"
        " with `tfrecord` in their names, or a folder of images"
    )


def select_inputs(
    batch: Batch, inference: InferenceFunction
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the columns of a batch that are inputs, and the others.

    An input that is no single number is one column, or the columns `NAME_0`, `NAME_1` and so on.

    Raises:
      UsageError: When an input has no column, or one of another shape or dtype.
    """
    others = dict(batch)
    inputs = {}
    for name, spec in inference.input_specs.items():
        parts = [name]
        size = spec.shape[1:].num_elements()
        if name not in batch and spec.shape.rank > 1 and size:
            parts = [f"{name}_{index}" for index in range(size)]
        row_shape = list(spec.shape[1:])
        next_part = f"{name}_{len(parts)}"
        is_longer = next_part in batch and parts != [name]
        if is_longer or not batch.keys() >= set(parts):
            listed = ", ".join(batch)
            parts_text = f" or in {parts[0]} to {parts[-1]}" if parts != [name] else ""
            raise UsageError(
                f"input: the columns are {listed:.200}; the model takes {name!r} of shape"
                f" {row_shape}, in a column of this name{parts_text}"
            )
        columns = [_convert_column(part, others.pop(part), spec.dtype) for part in parts]
        column = columns[0]
        if parts != [name]:
            stacked = np.stack(columns, axis=1)
            column = stacked.reshape([-1, *row_shape])
        if not spec.shape.is_compatible_with(column.shape):
            raise UsageError(
                f"input: {name!r} has the shape {list(column.shape[1:])} in a row, and the model"
                f" takes {row_shape}"
            )
        inputs[name] = column

    passed = {}
    for name, column in others.items():
        passed[name] = _convert_column(name, column)
    return inputs, passed


def is_read_by_task(data: Any) -> bool:
    """Whether data is a run's validation data, None, or the path or pattern of TFRecord files."""
    is_path = isinstance(data, (str, os.PathLike))
    return data is None or (is_path and "tfrecord" in Path(data).name)


def _open_validation_data(
    run: LoadedRun, inference: InferenceFunction, pattern: str | None
) -> PredictionInputs:
    """Returns a run's first validation set, or TFRecord files in its place, with its labels."""
    config = run.config
    if pattern is not None:
        if not hasattr(config.task.validation_data, "input_path"):
            raise UsageError(
                f"input: task.validation_data of the run has no input_path, so {pattern} cannot be"
                " read in its place"
            )
        config = config.replace(task={"validation_data": {"input_path": os.fspath(pattern)}})
    dataset = build_validation_dataset(config, run.task)
    if is_infinite(dataset):
        raise DataError("task.validation_data has no end; a prediction needs one")

    def read_batches(skipped: int) -> Iterator[Batch]:
        for batch in dataset.skip(skipped).prefetch(tf.data.AUTOTUNE):
            features = select_features(batch, run.model)
            columns = inference.name_features(features)
            label: Any = None
            if isinstance(batch, tuple) and len(batch) > 1:
                label = batch[1]
            if tf.is_tensor(label) and (label.shape.rank or 3) <= 2 and "label" not in columns:
                # A label is often a row of one number.
                columns["label"] = to_array(label)
                if label.shape[1:] == (1,):
                    columns["label"] = columns["label"][:, 0]
            yield columns

    section = config.task.validation_data
    identity: list[Any] = [repr(section)]
    files = getattr(section, "input_path", "")
    if isinstance(files, str):
        identity += _describe_files(sorted(glob.glob(files)))
    return PredictionInputs(
        identity=identity,
        read_batches=read_batches,
        # An unknown number is negative.
        batch_count=max(0, int(dataset.cardinality())) or None,
    )


def _slice_arrays(columns: Mapping[str, Any], batch_size: int) -> PredictionInputs:
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise UsageError(f"data: the arrays have different lengths: {lengths}")
    count = len(next(iter(arrays.values())))

    def read_batches(skipped: int) -> Iterator[Batch]:
        for begin in range(skipped * batch_size, count, batch_size):
            rows = slice(begin, begin + batch_size)
            yield {name: array[rows] for name, array in arrays.items()}

    return PredictionInputs(
        identity={name: zlib.crc32(array.tobytes()) for name, array in arrays.items()},
        read_batches=read_batches,
        batch_count=math.ceil(count / batch_size),
    )


def _open_table(path: Path, batch_size: int) -> PredictionInputs:
    """Returns the batches of a CSV or Parquet file. It is read in pieces."""
    import pandas

    def read_batches(skipped: int) -> Iterator[Batch]:
        with _explain_read_errors(path):
            frames: Iterable[pandas.DataFrame]
            if path.suffix == ".csv":
                # A passed column may have numbers in one piece and texts in another.
                frames = pandas.read_csv(
                    path,
                    dtype=str,
                    keep_default_na=False,
                    chunksize=batch_size,
                )
            else:
                parquet = import_runtime("pyarrow.parquet", "parquet")
                pieces = parquet.ParquetFile(path).iter_batches(batch_size)
                frames = (piece.to_pandas(ignore_metadata=True) for piece in pieces)
            for frame in itertools.islice(frames, skipped, None):
                missing = [name for name in frame if frame[name].isna().any()]
                if missing:
                    raise UsageError(f"{missing} have missing values; fill them")
                if len(frame):
                    yield {name: frame[name].to_numpy() for name in frame}

    return PredictionInputs(_describe_files([path]), read_batches)


def _open_images(folder: Path, inference: InferenceFunction, batch_size: int) -> PredictionInputs:
    """Returns the images of a folder, resized to the shape of the input, with their paths."""
    specs = list(inference.input_specs.values())
    _, *size = specs[0].shape
    is_known = len(size) == 3 and None not in size
    is_image = is_known and size[2] in _COLOR_MODES
    if len(specs) > 1 or not is_image:
        raise UsageError(
            f"input: {folder} is a folder of images, and the model takes {specs}; give a file of"
            " arrays"
        )

    with _explain_read_errors(folder):
        dataset = keras.utils.image_dataset_from_directory(
            folder,
            labels=None,
            color_mode=_COLOR_MODES[size[2]],
            batch_size=batch_size,
            image_size=size[:2],
            shuffle=False,
            verbose=False,
        )
    paths = dataset.file_paths
    relative_paths = [os.path.relpath(path, folder) for path in paths]
    names = tf.data.Dataset.from_tensor_slices(relative_paths)
    batches = tf.data.Dataset.zip((dataset, names.batch(batch_size)))

    def read_batches(skipped: int) -> Iterator[Batch]:
        with _explain_read_errors(folder):
            for images, files in batches.skip(skipped):
                pixels = tf.cast(images, specs[0].dtype)
                yield {specs[0].name: pixels, "file": to_array(files)}

    return PredictionInputs(
        identity=_describe_files(paths),
        read_batches=read_batches,
        batch_count=math.ceil(len(paths) / batch_size),
    )


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """A context in which a file may be damaged, or of another kind than its suffix says."""
    try:
        yield
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, tf.errors.OpError) as error:
        # TensorFlow names its operation first.
        text = str(error).strip()
        first_line = text.partition("\n")[0]
        line = first_line.rpartition("}} ")[2]
        raise UsageError(f"input: {path} cannot be read: {line:.200}") from error


def _convert_column(name: str, column: np.ndarray, dtype: tf.DType | None = None) -> np.ndarray:
    """Returns a column without objects: lists as one array, and texts as bytes.

    Args:
      name: The name of the column.
      column: The values of a batch.
      dtype: The dtype of an input. None: a column that is passed through.

    Raises:
      UsageError: When the lists differ in length, or the values are not of the dtype.
    """
    if tf.is_tensor(column):
        return column
    if column.dtype == object:
        try:
            column = np.array(column.tolist())
        except ValueError as error:
            raise UsageError(f"input: the lists in {name!r} differ in length") from error
        if column.dtype.kind == "U":
            column = np.char.encode(column, "utf-8")
        if column.dtype == object:
            raise UsageError(
                f"input: {name!r} has values that are neither numbers nor texts; leave it out, or"
                f" give the numbers of lists in lists as {name}_0, {name}_1 and so on"
            )
    if dtype is None or dtype == tf.string:
        return column

    if column.dtype.kind == "S" and not dtype.is_bool:
        # The numbers of a CSV file are texts, and a missing one is empty.
        if dtype.is_floating:
            column = np.where(column == b"", b"nan", column)
        try:
            column = column.astype(np.int64 if dtype.is_integer else np.float64)
        except ValueError as error:
            value = str(error).rpartition("bytes_(b")[2].rstrip(")")
            raise UsageError(f"input: {name!r} has {value:.40}, which is no number") from error
    kind = dtype.as_numpy_dtype
    if dtype.is_integer:
        is_integer = column.dtype.kind in "iu"
        is_allowed = is_integer and np.array_equal(column.astype(kind), column)
    else:
        is_allowed = np.can_cast(column.dtype, kind, "same_kind")
    if not is_allowed:
        raise UsageError(
            f"input: {name!r} has values of {column.dtype} that do not fit the {dtype.name} of the"
            " model"
        )
    return column.astype(kind, copy=False)


def _describe_files(paths: Sequence[str | Path]) -> list[Any]:
    """Returns names, sizes and times, by which a changed file is recognized."""
    described = []
    for path in paths:
        status = os.stat(path)
        name = os.path.basename(path)
        described.append([name, status.st_size, status.st_mtime_ns])
    return described
