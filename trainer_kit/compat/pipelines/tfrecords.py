"""TFRecord files as batched datasets: get_tfrecord_dataset, get_train_ds and get_valid_ds."""

from __future__ import annotations

import glob
import operator
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.compat.pipelines.example_functions import augmented, preprocessed
from trainer_kit.compat.pipelines.images import TFRECORD_FEATURES
from trainer_kit.compat.pipelines.labels import checked_percentage, get_labels
from trainer_kit.compat.pipelines.record_files import SplitFiles, number_of
from trainer_kit.errors import DataError, UsageError

_TRAIN, _VALID = "train", "valid"
# With a seed of its own a shuffle depends on tf.random.set_seed, if there is one, and on nothing else that the program
# has done: it is the same in a process that goes on.
_FILES_SEED, _RECORDS_SEED = 1, 2


def get_tfrecord_dataset(
    dataset_path: str | os.PathLike[str],
    preprocessing: Callable[..., Any],
    global_batch_size: int,
    split: str | None = None,
    data_augmentation: Callable[..., Any] | None = None,
    *,
    is_train: bool | None = None,
    percentage: float = 100,
    shuffle_buffer: int = 2048,
) -> tf.data.Dataset:
    """Returns the batches of `{dataset_path}/{split}-*.tfrec`, a tf.data.Dataset for further transformations.

    Runs eagerly.

    Training data comes in another order in each pass: the files are shuffled, 16 of them are read in turn, and their
    records are shuffled in a buffer. The orders follow from `tf.random.set_seed` alone, so that a run that is started
    again reads the same batches. A smaller last batch is left out, as models for TPUs need it. Other splits are one
    pass in the order of names and records, with all examples and without augmentation.

    Files may be compressed (GZIP or ZLIB); each is recognised by its first bytes. The records are counted: of plain
    files by their headers, which takes less than a second for a million; compressed ones are read once. So the length
    of the dataset is known.

    Args:
      dataset_path: A local folder.
      preprocessing: A function that is called as `preprocessing(example=record)`, with a serialized example, string
        []; it returns the parts of an example, such as (image, label). It runs in graph.
      global_batch_size: The number of examples in a batch, over all replicas.
      split: The first part of the names of the files: "train", "valid", or another one.
      data_augmentation: A function that is called with the parts of each training example, `data_augmentation(image,
        label)`, and returns them; one with a single required argument, such as a Keras layer, gets the first part,
        and the others stay. It runs in graph, and may draw random numbers: one example after the other is changed
        then, so that two runs draw the same.
      is_train: True for split="train", False for split="valid".
      percentage: See `get_labels`. Below 100, only examples of the first classes of labels.txt are read, by their
        feature `label`, a string.
      shuffle_buffer: The number of serialized examples among which the next one is drawn.

    Raises:
      UsageError: when an argument cannot be used, or the folder is remote.
      DataError: when no file matches (it is a FileNotFoundError too), a file is damaged, or there are no examples or
        fewer than a batch.
    """
    split = _split(split, is_train)
    training, size = split == _TRAIN, _size("global_batch_size", global_batch_size)
    files = SplitFiles.find(dataset_path, split)
    share = checked_percentage(percentage)
    records, number = _chosen(files, dataset_path, share, _FILES_SEED if training else None)
    if number < (size if training else 1):
        of_classes = "" if share == 100 else f" of the first {share:g} % of the classes"
        raise DataError(
            f"{files.pattern} has {number} examples{of_classes}, and a batch {size}; lower global_batch_size, or add "
            "files"
        )
    records = records.apply(tf.data.experimental.assert_cardinality(number))
    if training:
        records = records.shuffle(min(number, _size("shuffle_buffer", shuffle_buffer)), seed=_RECORDS_SEED)
    examples = preprocessed(records, preprocessing)
    if training and data_augmentation is not None:
        examples = augmented(examples, data_augmentation)
    return examples.batch(size, drop_remainder=training).prefetch(tf.data.AUTOTUNE)


def get_train_ds(
    dataset_path: str | os.PathLike[str],
    preprocessing: Callable[..., Any],
    global_batch_size: int,
    percentage: float = 100,
    data_augmentation: Callable[..., Any] | None = None,
    *,
    shuffle_buffer: int = 2048,
) -> tf.data.Dataset:
    """Returns the batches of the split "train"; see `get_tfrecord_dataset`."""
    return get_tfrecord_dataset(
        dataset_path,
        preprocessing,
        global_batch_size,
        _TRAIN,
        data_augmentation,
        percentage=percentage,
        shuffle_buffer=shuffle_buffer,
    )


def get_valid_ds(
    dataset_path: str | os.PathLike[str],
    preprocessing: Callable[..., Any],
    global_batch_size: int,
    percentage: float = 100,
) -> tf.data.Dataset:
    """Returns the batches of the split "valid"; see `get_tfrecord_dataset`."""
    return get_tfrecord_dataset(dataset_path, preprocessing, global_batch_size, _VALID, percentage=percentage)


def _chosen(
    files: SplitFiles, dataset_path: str | os.PathLike[str], share: float, files_seed: int | None
) -> tuple[tf.data.Dataset, int]:
    """Returns the serialized examples of the classes that are used, string [], and their number."""
    records = files.records(shuffle_seed=files_seed)
    if share == 100:
        return records, files.count()
    labels = tf.constant(get_labels(dataset_path, share)[1])

    @tf.autograph.experimental.do_not_convert
    def is_chosen(record: tf.Tensor) -> tf.Tensor:
        parsed = tf.io.parse_single_example(record, {"label": TFRECORD_FEATURES["label"]})
        return tf.reduce_any(labels == parsed["label"])

    name = f"{files.pattern} with percentage={share:g}, which needs the feature 'label' (a string) in each record,"
    return records.filter(is_chosen), number_of(files.records().filter(is_chosen), name)


def _split(split: Any, is_train: Any) -> str:
    """Returns the name of the split. Raises UsageError when the two arguments say nothing or two things."""
    if is_train not in (None, True, False):
        raise UsageError(f"is_train={is_train!r} is not True or False; split='train' and split='valid' say the same")
    if split is None and is_train is None:
        raise UsageError("which files? Give split='train' or split='valid', or is_train=True or False")
    named = (_TRAIN if is_train else _VALID) if split is None else split
    if not isinstance(named, str) or not named or os.sep in named or glob.escape(named) != named:
        raise UsageError(f"split={split!r} is not the first part of the names of files, such as 'train' or 'valid'")
    if is_train is not None and bool(is_train) != (named == _TRAIN):
        raise UsageError(f"split={split!r} and is_train={is_train} are two things; give one of them")
    return named


def _size(name: str, value: Any) -> int:
    """Returns a number of examples. Raises UsageError for anything but a whole number above 0."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise UsageError(f"{name}={value!r} is not a number of examples; give a whole number above 0")
    return size
