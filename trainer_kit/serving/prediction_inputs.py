"""The inputs of a prediction: a run's validation data, TFRecords, arrays, tables or images."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError, suggest_paths
from trainer_kit.serving.export_formats import import_runtime
from trainer_kit.serving.inference_function import InferenceFunction
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

    def read_batches(skipped: int) -> Iterator[Batch]:
        for batch in dataset.skip(skipped).prefetch(tf.data.AUTOTUNE):
            features = select_features(batch, run.model)
            keys = {}
            if isinstance(batch, tuple) and len(batch) > 1 and tf.is_tensor(batch[1]):
                if batch[1].shape.rank == 1:
                    keys[_LABEL] = batch[1].numpy()
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
        return _slice_arrays(arrays, "arrays", inference, batch_size)

    path = os.fspath(data)
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
    if suffix == ".npy":
        arrays = _name_arrays(np.load(path, mmap_mode="r"), inference)
        return _slice_arrays(arrays, _describe_file(path), inference, batch_size)
    if suffix in (".csv", ".parquet"):
        return _open_table(path, inference, batch_size)
    raise UsageError(
        f"input: {path} is of no known kind; give a .npz, .npy, .csv or .parquet file, files with"
        " `tfrecord` in their names, or a folder of images"
    )


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

    def read_frames(skipped: int) -> Iterator[Any]:
        if is_csv:
            rows = range(1, 1 + skipped * batch_size)
            yield from pandas.read_csv(path, skiprows=rows, chunksize=batch_size)
            return
        for number, piece in enumerate(parquet.ParquetFile(path).iter_batches(batch_size)):
            if number >= skipped:
                yield piece.to_pandas()

    def read_batches(skipped: int) -> Iterator[Batch]:
        for frame in read_frames(skipped):
            columns = {}
            for name, parts in groups.items():
                values = [np.stack(frame[part].to_numpy()) for part in parts]
                columns[name] = values[0] if parts == [name] else np.stack(values, axis=1)
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

    listed = [os.path.relpath(path, folder) for path in paths]
    return PredictionInputs(listed, read_batches, math.ceil(len(paths) / batch_size))


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
      UsageError: When the shape of an input is another one.
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
        else:
            inputs[name] = column
    return inputs, keys


def _describe_file(path: str) -> dict[str, Any]:
    """Returns what tells a file from another one of its name."""
    status = os.stat(path)
    return {"path": os.path.abspath(path), "bytes": status.st_size, "changed": status.st_mtime_ns}
