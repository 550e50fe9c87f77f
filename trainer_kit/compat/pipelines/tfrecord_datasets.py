"""TFRecord files of images as batched datasets, and the classes of a data set."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.preprocessing.image import smart_resize

from trainer_kit.compat.pipelines.example_functions import apply_augmentation, apply_preprocessing
from trainer_kit.errors import DataError, UsageError, suggest_names
from trainer_kit.files import is_remote
from trainer_kit.inputs.sources.tfrecord_index import RecordFiles, read_compression
from trainer_kit.process.error_report import format_reason

_LABELS_FILE = "labels.txt"
_TRAIN = "train"
_VALID = "valid"

# The number of files that are read in turn.
_READ_AT_ONCE = 16

# With a separate seed a shuffle depends on tf.random.set_seed, if there is one, and on nothing
# else that the program has done: it is the same in a process that continues a run.
_FILES_SEED = 1
_RECORDS_SEED = 2

TFRECORD_FEATURES: dict[str, tf.io.FixedLenFeature] = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.string),
}
"""The features of a record for `tf.io.parse_single_example`.

They are an encoded image, and a label as in labels.txt.
"""


class MissingFilesError(DataError, FileNotFoundError):
    """A data set lacks the files that were asked for. A FileNotFoundError, as in the original."""


def get_labels(
    dataset_path: str | os.PathLike[str], percentage: float = 100
) -> tuple[int, list[str]]:
    """Returns the number of classes and their labels, from `dataset_path`/labels.txt.

    The file is UTF-8 text with one label a line. The index of a label in the list is the number of
    its class. Blank lines, and spaces around a label, do not count.

    Args:
      dataset_path: The folder of the data set.
      percentage: The share of the classes, from 1 to 100: the first ones of the file, rounded down,
        and at least one. So the classes of a smaller share have the same numbers in a larger one.
        `get_train_ds` and `get_valid_ds` with the same percentage read the examples of these
        classes only.

    Raises:
      UsageError: For a percentage out of its bounds, and for a remote folder.
      DataError: When the file is missing (it is a FileNotFoundError too), has no label or one
        twice, or is not UTF-8.
    """
    share = _check_percentage(percentage)
    folder = _check_local_folder(dataset_path)
    path = os.path.join(folder, _LABELS_FILE)
    try:
        # The file may have a byte order mark. open() reads \r\n as \n.
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file]
    except FileNotFoundError as error:
        raise MissingFilesError(
            f"{path} is missing; {_describe_folder(folder, _LABELS_FILE)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error

    labels = [line for line in lines if line]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    problem = "has no label"
    if repeated:
        problem = f"has the label {repeated[0]!r} twice"
    if not labels or repeated:
        raise DataError(f"{path} {problem}; write one label a line, and each class once")

    count = max(1, int(len(labels) * share / 100))
    used_labels = labels[:count]
    return len(used_labels), used_labels


def get_tfrecord_dataset(
    dataset_path: str | os.PathLike[str],
    preprocessing: Callable[..., object],
    global_batch_size: int,
    split: str | None = None,
    data_augmentation: Callable[..., object] | None = None,
    *,
    is_train: bool | None = None,
    percentage: float = 100,
    shuffle_buffer: int = 2048,
) -> tf.data.Dataset:
    """Returns the batches of `{dataset_path}/{split}-*.tfrec`.

    The result is a tf.data.Dataset for further transformations. Runs eagerly, on the host.

    Training data comes in another order in each pass: the files are shuffled, 16 of them are read
    in turn, and their records are shuffled in a buffer. The orders follow from `tf.random.set_seed`
    alone, so that a run that is started again reads the same batches. A smaller last batch is left
    out, as models for TPUs need it. Other splits are one pass in the order of names and records,
    with all examples and without augmentation.

    Files may be compressed (GZIP or ZLIB). Each is recognised by its first bytes. The records are
    counted, so that the length of the dataset is known. Plain files are counted by their headers,
    which takes less than a second for a million records. Compressed ones are read once.

    Args:
      dataset_path: A local folder.
      preprocessing: A function that is called as `preprocessing(example=record)`, with a serialized
        example, string []. It returns the parts of an example, such as (image, label). It runs in
        graph.
      global_batch_size: The number of examples in a batch, over all replicas.
      split: The first part of the names of the files: "train", "valid", or another one.
      data_augmentation: A function that is called with the parts of each training example,
        `data_augmentation(image, label)`, and returns them. One with a single required argument,
        such as a Keras layer, gets the first part, and the others stay. It runs in graph, and may
        draw random numbers: one example after the other is changed then, so that two runs draw the
        same.
      is_train: True for split="train", False for split="valid".
      percentage: See `get_labels`. Below 100, only examples of the first classes of labels.txt are
        read, by their feature `label`, a string.
      shuffle_buffer: The number of serialized examples among which the next one is drawn.

    Raises:
      UsageError: When an argument cannot be used, or the folder is remote.
      DataError: When no file matches (it is a FileNotFoundError too), a file is damaged, or there
        are no examples or fewer than a batch.
    """
    split = _resolve_split_name(split, is_train)
    is_training = split == _TRAIN
    # The program may pass anything. A bool is an int for Python.
    size: Any = global_batch_size
    is_number = isinstance(size, (int, np.integer))
    is_bool = isinstance(size, bool)
    if not is_number or is_bool or size < 1:
        raise UsageError(
            f"global_batch_size={size!r} is not a number of examples; give a whole number above 0"
        )
    share = _check_percentage(percentage)

    files = _SplitFiles(dataset_path, split)
    files_seed = _FILES_SEED if is_training else None
    records, count = _read_class_records(files, dataset_path, share, files_seed)
    min_count = size if is_training else 1
    if count < min_count:
        classes = ""
        if share != 100:
            classes = f" of the first {share:g} % of the classes"
        raise DataError(
            f"{files.pattern} has {count} examples{classes}, and a batch {size}; lower"
            " global_batch_size, or add files"
        )

    records = records.apply(tf.data.experimental.assert_cardinality(count))
    if is_training:
        records = records.shuffle(min(count, shuffle_buffer), seed=_RECORDS_SEED)
    examples = apply_preprocessing(records, preprocessing)
    if is_training and data_augmentation is not None:
        examples = apply_augmentation(examples, data_augmentation)
    return examples.batch(size, drop_remainder=is_training).prefetch(tf.data.AUTOTUNE)


def get_train_ds(
    dataset_path: str | os.PathLike[str],
    preprocessing: Callable[..., object],
    global_batch_size: int,
    percentage: float = 100,
    data_augmentation: Callable[..., object] | None = None,
    *,
    shuffle_buffer: int = 2048,
) -> tf.data.Dataset:
    """Returns the batches of the split "train". See `get_tfrecord_dataset`."""
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
    preprocessing: Callable[..., object],
    global_batch_size: int,
    percentage: float = 100,
) -> tf.data.Dataset:
    """Returns the batches of the split "valid". See `get_tfrecord_dataset`."""
    return get_tfrecord_dataset(
        dataset_path, preprocessing, global_batch_size, _VALID, percentage=percentage
    )


def preprocess_image(image: tf.Tensor | np.ndarray, size: int | tuple[int, int]) -> tf.Tensor:
    """Returns a decoded image as the input of a model.

    The image is scaled to [0, 1], cropped at its centre and resized: the largest part in the middle
    with the proportions of `size` is resized, bilinearly. Runs in graph or eagerly.

    Args:
      image: Tensor or array, [height, width, channels]. Integers are scaled by the largest value of
        their dtype, as `tf.image.convert_image_dtype` does. Floats are in [0, 1] already. The shape
        may be unknown, as that of `tf.image.decode_image`.
      size: The height and the width of the result. One number for a square.

    Returns:
      float32 [height, width, channels].

    Raises:
      UsageError: When `size` is neither a positive number nor two.
    """
    target: Any = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    are_numbers = all(isinstance(pixels, int) and pixels > 0 for pixels in target)
    if len(target) != 2 or not are_numbers:
        raise UsageError(
            f"preprocess_image: size={size!r}; give a positive number of pixels, or (height,"
            " width); a model whose input has no fixed size does not tell it by"
            " get_model_input_size()"
        )
    image = tf.convert_to_tensor(image)

    # XLA needs the number of channels, and `tf.image.decode_image` hides it.
    channels = None
    if image.shape.rank is not None:
        channels = image.shape[-1]
    elif not tf.executing_eagerly() and image.op.type == "DecodeImage":
        channels = image.op.get_attr("channels") or None
    image = tf.ensure_shape(image, [None, None, channels])

    # smart_resize crops to the proportions of the target before it resizes.
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = smart_resize(image, target)
    return tf.ensure_shape(image, [*target, channels])


class _SplitFiles:
    """The files of one split, `{folder}/{split}-*.tfrec`. Files without a byte are left out.

    Attributes:
      pattern: The path with the wildcard, for messages.
      paths: The files with records, sorted by name.
      compressions: Of each file "", "GZIP" or "ZLIB", as its first bytes indicate.

    Raises:
      UsageError: For a remote folder.
      MissingFilesError: When no file matches.
      DataError: When all files are empty, or one cannot be read.
    """

    def __init__(self, dataset_path: str | os.PathLike[str], split: str) -> None:
        folder = _check_local_folder(dataset_path)
        names = f"{split}-*.tfrec"
        self.pattern = os.path.join(folder, names)
        # The folder itself may contain characters that are wildcards.
        pattern = os.path.join(glob.escape(folder), names)
        matches = sorted(glob.glob(pattern))
        if not matches:
            advice = _describe_folder(folder, f"{split}-00000.tfrec")
            raise MissingFilesError(f"no file matches {self.pattern}; {advice}")

        self.paths = [path for path in matches if os.path.getsize(path)]
        if not self.paths:
            raise DataError(
                f"{self.pattern} matches only empty files, without a record; write them again"
            )
        self.compressions = [read_compression(path) for path in self.paths]

    def records(self, shuffle_seed: int | None = None) -> tf.data.Dataset:
        """Returns a dataset of the serialized examples, string []. Runs eagerly, on the host.

        Args:
          shuffle_seed: The seed of the order of the files. Each pass draws another order, and
            several files are read in turn. None: one file after the other. The order of records is
            the same on every machine.
        """
        files = tf.data.Dataset.from_tensor_slices((self.paths, self.compressions))
        cycle_length = 1
        if shuffle_seed is not None:
            files = files.shuffle(len(self.paths), seed=shuffle_seed)
            cycle_length = min(_READ_AT_ONCE, len(self.paths))
        return files.interleave(
            _records_of_file,
            cycle_length=cycle_length,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    def count(self) -> int:
        """Returns the number of records.

        Plain files are counted by their headers, compressed ones are read.

        Raises:
          DataError: When a file is cut, damaged or not a TFRecord file.
        """
        count = 0
        for path, compression in zip(self.paths, self.compressions, strict=True):
            if compression:
                records = tf.data.TFRecordDataset(path, compression_type=compression)
                count += _count_elements(records, path)
            else:
                count += len(RecordFiles([path]))
        return count


@tf.autograph.experimental.do_not_convert
def _records_of_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path, compression_type=compression)


def _read_class_records(
    files: _SplitFiles,
    dataset_path: str | os.PathLike[str],
    percentage: float,
    files_seed: int | None,
) -> tuple[tf.data.Dataset, int]:
    """Returns the serialized examples of the classes that are used, string [], and their number."""
    records = files.records(files_seed)
    if percentage == 100:
        return records, files.count()

    labels = tf.constant(get_labels(dataset_path, percentage)[1])

    @tf.autograph.experimental.do_not_convert
    def is_used(record: tf.Tensor) -> tf.Tensor:
        features = {"label": TFRECORD_FEATURES["label"]}
        parsed = tf.io.parse_single_example(record, features)
        return tf.reduce_any(labels == parsed["label"])

    name = (
        f"{files.pattern} with percentage={percentage:g}, which needs the feature 'label' (a"
        " string) in each record,"
    )
    used_records = records.filter(is_used)
    ordered_records = files.records().filter(is_used)
    return used_records, _count_elements(ordered_records, name)


def _count_elements(dataset: tf.data.Dataset, name: str) -> int:
    """Returns the number of elements, by reading them.

    Raises:
      DataError: When they cannot be read. Its message begins with `name`.
    """
    try:
        zero = tf.constant(0, tf.int64)
        number = dataset.reduce(zero, lambda count, _: count + 1)
        return int(number)
    except tf.errors.OpError as error:
        raise DataError(f"{name} cannot be read: {format_reason(error)[0]}") from error


def _check_local_folder(dataset_path: str | os.PathLike[str]) -> str:
    """Returns the path of a data set's folder. Raises UsageError for a remote one."""
    if is_remote(dataset_path):
        raise UsageError(
            f"dataset_path={os.fspath(dataset_path)} is remote, which is not supported; copy the"
            " files"
        )
    return os.fspath(dataset_path)


def _describe_folder(folder: str, missing_file: str) -> str:
    """Returns advice for the error about a missing file: the names in the folder that are near."""
    if not os.path.isdir(folder):
        return "there is no such folder"
    return f"in {folder} {suggest_names(missing_file, os.listdir(folder))}"


def _resolve_split_name(split: str | None, is_train: bool | None) -> str:
    """Returns the name of the split.

    Raises:
      UsageError: Unless exactly one of the two arguments gives the name.
    """
    if (split is None) == (is_train is None):
        raise UsageError(
            "which files? Give either split='train' or split='valid', or is_train=True or False"
        )
    if is_train is not None:
        return _TRAIN if is_train else _VALID
    # A wildcard would match the files of several splits.
    if not isinstance(split, str) or not split or os.sep in split or glob.escape(split) != split:
        raise UsageError(
            f"split={split!r} is not the first part of the names of files, such as 'train' or"
            " 'valid'"
        )
    return split


def _check_percentage(percentage: object) -> float:
    """Returns a percentage as a float.

    Raises:
      UsageError: Out of its bounds. A number below 1 was probably meant as a fraction.
    """
    if not isinstance(percentage, (int, float, np.number)) or not 1 <= percentage <= 100:
        raise UsageError(
            f"percentage={percentage!r} is not from 1 to 100: give 100 for all classes, 50 for half"
        )
    return float(percentage)
