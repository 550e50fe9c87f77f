"""The structure of a tf.data.Dataset, read from its Python objects."""

from __future__ import annotations

import re
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.errors.user_frames import Frame, select_user_frames
from trainer_kit.runtime.tensorflow_internals import get_dataset_functions, get_input_datasets

_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
# With endless inputs their output has no end either, although TensorFlow calls the length of some
# of them unknown.
_INFINITE_IF_INPUTS_ARE = {
    "Batch",
    "Filter",
    "FlatMap",
    "Interleave",
    "Map",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelFilter",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Rebatch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Skip",
    "Unbatch",
    "Zip",
}


def iterate_transformations(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all datasets that it is made from, each once.

    Datasets that are made inside its functions are not included.
    """
    pending = [dataset]
    visited = set()
    while pending:
        part = pending.pop()
        if id(part) not in visited:
            visited.add(id(part))
            yield part
            pending += get_input_datasets(part)


def is_infinite(dataset: object) -> bool:
    """Whether a dataset is known to have no end, by its cardinality or that of its inputs.

    TensorFlow calls the length of `repeat().filter(...)` and of `repeat().flat_map(...)` unknown.
    Endless datasets that functions return, as those of an interleave over files, are not detected.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return False
    cardinality = int(dataset.cardinality())
    if cardinality != tf.data.UNKNOWN_CARDINALITY:
        return cardinality == tf.data.INFINITE_CARDINALITY

    inputs = get_input_datasets(dataset)
    return (
        get_transformation_kind(dataset) in _INFINITE_IF_INPUTS_ARE
        and bool(inputs)
        and all(map(is_infinite, inputs))
    )


def declare_endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that has no end, with a cardinality that says so."""
    return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def find_failed_op_line(message: str, dataset: object) -> Frame | None:
    """Returns the user's line that made the operation that failed in a function of a dataset.

    Returns None if the line is not known.

    Args:
      message: The message of TensorFlow's error, which names the operation and not the line.
      dataset: The tf.data.Dataset that was read. Any other object has no such functions.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return None
    names = _NODE.findall(message)
    for part in iterate_transformations(dataset):
        for graph in get_dataset_functions(part):
            for operation in graph.get_operations():
                if operation.name not in names:
                    continue
                frames = select_user_frames(operation.traceback)
                if frames:
                    return frames[-1]
    return None


def get_transformation_kind(dataset: tf.data.Dataset) -> str:
    """Returns "ParallelMap" for a _ParallelMapDataset."""
    return parse_transformation_kind(type(dataset).__name__)


def parse_transformation_kind(name: str) -> str:
    """Returns "ParallelMap" for _ParallelMapDataset and for the op ParallelMapDatasetV2."""
    return re.sub(r"Dataset(V\d)?$", "", name.lstrip("_"))
