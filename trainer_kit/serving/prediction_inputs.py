"""The inputs of a prediction: a run's validation data, TFRecords, arrays, tables or images."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
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

# A batch of inputs by name, and the columns that are passed through.
Batch = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_LABEL = "label"


@dataclass(frozen=True)
class PredictionInputs:
    """Batches in the order of the data.

    Attributes:
      identity: What the data is, in JSON types.
      read_batches: Returns the batches after the first ones, whose number it takes.
      batch_count: The number of batches. None if it is not known.
    """

    identity: Any
    read_batches: Callable[[int], Iterator[Batch]]
    batch_count: int | None


def open_validation_data(
    run: LoadedRun, inference: InferenceFunction, files: str | None = None
) -> PredictionInputs:
    """Returns the batches of a run's first validation set. A label is passed through.

    Args:
      run: The run.
      inference: Its inference.
      files: A pattern of TFRecord files to read in place of those of the validation set.
    """
    config = run.config
    section = config.task.validation_data
    if files is not None:
        if not hasattr(section, "input_path"):
            raise UsageError(
                f"input: task.validation_data of the run has no input_path, so {files} cannot be"
                " read in its place"
            )
        section = section.replace(input_path=files)
        config = config.replace(task=config.task.replace(validation_data=section))
    dataset = build_validation_dataset(config, run.task)
    count = int(dataset.cardinality())
    if is_infinite(dataset):
        raise DataError("task.validation_data has no end; a prediction needs one")

    def read_batches(skipped: int) -> Iterator[Batch]:
        for batch in dataset.skip(skipped).prefetch(tf.data.AUTOTUNE):
            features = select_features(batch, run.model)
            keys = {}
            if isinstance(batch, tuple) and len(batch) > 1 and tf.is_tensor(batch[1]):
                if batch[1].shape.rank == 1:
                    keys[_LABEL] = to_array(batch[1])
            yield dict(zip(inference.input_specs, tf.nest.flatten(features), strict=True)), keys

    identity = section.as_dict() if hasattr(section, "as_dict") else repr(section)
    return PredictionInputs(identity, read_batches, count if count >= 0 else None)


def open_inputs(
    data: Any, run: LoadedRun | None, inference: InferenceFunction, batch_size: int
) -> PredictionInputs:
    """Returns the batches of `data`. See `trainer_kit.predict`.

    Raises:
      UsageError: When the data does not exist or does not fit the inputs.
    """
    if data is None:
        if run is None:
            raise UsageError("predict: a model needs data; give arrays, or the path of a file")
        return open_validation_data(run, inference)
    if not isinstance(data, (str, os.PathLike)):
        arrays = _name_arrays(data, inference)
        return _slice_arrays(arrays, _compute_checksums(arrays), inference, batch_size)

    path = os.fspath(data)
    with _explain_read_errors(path):
        inputs = _open_file(path, run, inference, batch_size)

    def read_batches(skipped: int) -> Iterator[Batch]:
        with _explain_read_errors(path):
            yield from inputs.read_batches(skipped)

    return PredictionInputs(inputs.identity, read_batches, inputs.batch_count)


def _open_file(
    path: str, run: LoadedRun | None, inference: InferenceFunction, batch_size: int
) -> PredictionInputs:
    if os.path.isdir(path):
        return _open_images(path, inference, batch_size)
    if is_tfrecord(path) and run is not None:
        return open_validation_data(run, inference, path)
    if not os.path.exists(path):
        folder = Path(path).parent
        names = os.listdir(folder) if folder.is_dir() else []
        raise UsageError(
            f"input: there is no file {path}; {suggest_paths(Path(path), names, 'files')}"
        )
    suffix = Path(path).suffix
    if suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _slice_arrays(arrays, _describe_file(path), inference, batch_size)
    if suffix in (".csv", ".parquet"):
        return _open_table(path, inference, batch_size)
    raise UsageError(
        f"input: {path} has an unsupported suffix; give a .npz, .csv or .parquet file, files"
        " with `tfrecord` in their names, or a folder of images"
    )


@contextlib.contextmanager
def _explain_read_errors(path: str) -> Iterator[None]:
    """A context in which a file may be damaged, or of another kind than its suffix says."""
    try:
        yield
    except (ValueError, TypeError, zipfile.BadZipFile, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, UsageError):
            raise
        line = str(error).strip().partition("\n")[0]
        raise UsageError(f"input: {path} cannot be read: {line:.200}") from error


def is_tfrecord(data: Any) -> bool:
    """Whether data is the path or the pattern of TFRecord files, which the task of a run reads."""
    return isinstance(data, (str, os.PathLike)) and "tfrecord" in Path(data).name


def _name_arrays(data: Any, inference: InferenceFunction) -> dict[str, np.ndarray]:
    """Returns arrays in the structure of the features, or a dict with further columns, by name."""
    if isinstance(data, Mapping):
        return {name: np.asarray(value) for name, value in data.items()}
    parts = keras.tree.flatten(data) if isinstance(data, (list, tuple)) else [data]
    names = list(inference.input_specs)
    if len(parts) != len(names):
        raise UsageError(
            f"data: {len(parts)} arrays were given, and the inputs are {', '.join(names)}"
        )
    return {name: np.asarray(part) for name, part in zip(names, parts, strict=True)}


def _slice_arrays(
    arrays: Mapping[str, np.ndarray], identity: Any, inference: InferenceFunction, batch_size: int
) -> PredictionInputs:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"data: the arrays have different lengths: {lengths}")
    check_columns(list(arrays), inference, "data")
    count = next(iter(lengths.values()))

    def read_batches(skipped: int) -> Iterator[Batch]:
        for begin in range(skipped * batch_size, count, batch_size):
            columns = {name: array[begin : begin + batch_size] for name, array in arrays.items()}
            yield split_columns(columns, inference)

    return PredictionInputs(identity, read_batches, math.ceil(count / batch_size))


def _open_table(path: str, inference: InferenceFunction, batch_size: int) -> PredictionInputs:
    """Returns the batches of a CSV or Parquet file. It is read in pieces."""
    is_csv = path.endswith(".csv")
    if is_csv:
        import pandas

        names = list(pandas.read_csv(path, nrows=0).columns)
    else:
        parquet = import_runtime("pyarrow.parquet", "parquet")
        names = list(parquet.ParquetFile(path).schema_arrow.names)
    groups = group_columns(names, inference)

    passed_names = [name for name in groups if name not in inference.input_specs]

    def read_frames() -> Iterator[Any]:
        if is_csv:
            # Whatever a passed column has, all of its rows have the same form.
            dtypes = dict.fromkeys(passed_names, str)
            yield from pandas.read_csv(
                path, dtype=dtypes, keep_default_na=False, chunksize=batch_size
            )
            return
        for piece in parquet.ParquetFile(path).iter_batches(batch_size):
            yield piece.to_pandas(ignore_metadata=True)

    def read_batches(skipped: int) -> Iterator[Batch]:
        for frame in itertools.islice(read_frames(), skipped, None):
            columns = {}
            for name, parts in groups.items():
                column = frame[parts].to_numpy() if len(parts) > 1 else frame[parts[0]].to_numpy()
                columns[name] = _convert_objects(name, column)
            yield split_columns(columns, inference)

    return PredictionInputs(_describe_file(path), read_batches, None)


def _open_images(folder: str, inference: InferenceFunction, batch_size: int) -> PredictionInputs:
    """Returns the images of a folder, resized to the shape of the input, with their paths."""
    paths = []
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix.lower() in _IMAGES:
            paths.append(path)
    if not paths:
        raise UsageError(f"input: {folder} has no image ({', '.join(_IMAGES)})")
    ((name, spec),) = list(inference.input_specs.items())[:1]
    if len(inference.input_specs) > 1 or spec.shape.rank != 4 or None in spec.shape[1:]:
        raise UsageError(
            f"input: {folder} is a folder of images, and the model takes"
            f" {', '.join(map(str, inference.input_specs.values()))}; give a file of arrays"
        )
    height, width, channels = spec.shape[1:]

    def read_image(path: Path) -> np.ndarray:
        content = tf.io.read_file(str(path))
        image = tf.io.decode_image(content, channels=channels, expand_animations=False)
        if tuple(image.shape[:2]) != (height, width):
            image = tf.image.resize(image, [height, width])
        return tf.cast(image, spec.dtype).numpy()

    def read_batches(skipped: int) -> Iterator[Batch]:
        for begin in range(skipped * batch_size, len(paths), batch_size):
            chosen = paths[begin : begin + batch_size]
            files = np.array([os.path.relpath(path, folder) for path in chosen])
            yield {name: np.stack([read_image(path) for path in chosen])}, {"file": files}

    identity = [_describe_file(str(path)) for path in paths]
    return PredictionInputs(identity, read_batches, math.ceil(len(paths) / batch_size))


def group_columns(names: list[str], inference: InferenceFunction) -> dict[str, list[str]]:
    """Returns the columns of a file by input, and those that are passed through by themselves.

    An input that is a vector is one column of lists, or the columns `NAME_0`, `NAME_1` and so on.

    Raises:
      UsageError: When an input has no column.
    """
    groups: dict[str, list[str]] = {}
    remaining = list(names)
    for name, spec in inference.input_specs.items():
        parts = [name]
        if name not in remaining and spec.shape.rank == 2 and spec.shape[1] is not None:
            parts = [f"{name}_{index}" for index in range(spec.shape[1])]
        if any(part not in remaining for part in parts):
            listed = ", ".join(names[:12])
            raise UsageError(
                f"input: the columns {listed} do not have the input {name!r} of shape"
                f" {list(spec.shape[1:])}; name them {name!r}, or {name}_0, {name}_1 and so on"
            )
        groups[name] = parts
        remaining = [part for part in remaining if part not in parts]
    return {**groups, **{name: [name] for name in remaining}}


def check_columns(names: list[str], inference: InferenceFunction, source: str) -> None:
    """Raises UsageError when an input has no column of its name."""
    missing = [name for name in inference.input_specs if name not in names]
    if missing:
        raise UsageError(
            f"{source}: the columns are {', '.join(names)}, and the model also takes"
            f" {', '.join(missing)}"
        )


def split_columns(columns: Mapping[str, np.ndarray], inference: InferenceFunction) -> Batch:
    """Returns the columns that are inputs, and the others.

    Raises:
      UsageError: When the shape or the dtype of an input is another one.
    """
    inputs = {}
    keys = {}
    for name, column in columns.items():
        spec = inference.input_specs.get(name)
        if spec is None:
            keys[name] = column
        elif not spec.shape.is_compatible_with(column.shape):
            raise UsageError(
                f"input: {name!r} has the shape {list(column.shape[1:])} in a row, and the model"
                f" takes {list(spec.shape[1:])}"
            )
        elif not np.can_cast(column.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
            raise UsageError(
                f"input: {name!r} has values of {column.dtype}, and the model takes"
                f" {spec.dtype.name}"
            )
        else:
            inputs[name] = column
    return inputs, keys


def _compute_checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}


def _convert_objects(name: str, column: np.ndarray) -> np.ndarray:
    """Returns a column of lists as one array, and one of texts as bytes.

    Raises:
      UsageError: When it has other objects, or lists of several lengths.
    """
    if column.dtype != object:
        return column
    if all(isinstance(value, (str, bytes)) for value in column):
        return np.array([value.encode() if isinstance(value, str) else value for value in column])
    try:
        return np.stack([np.asarray(value) for value in column])
    except ValueError as error:
        raise UsageError(f"input: the lists in the column {name!r} differ in length") from error


def _describe_file(path: str) -> dict[str, Any]:
    """Returns what tells a file from another one of its name."""
    status = os.stat(path)
    return {"path": os.path.abspath(path), "bytes": status.st_size, "changed": status.st_mtime_ns}
