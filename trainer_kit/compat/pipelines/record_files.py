"""The TFRecord files of a data set: which there are, whether they are compressed, and how many records they have."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, UsageError, near_names
from trainer_kit.files import is_remote
from trainer_kit.inputs.sources.tfrecord_index import RecordFiles, compression_of

_LISTED = 6  # names in a message
_READ_AT_ONCE = 16  # files


class MissingFilesError(DataError, FileNotFoundError):
    """A data set has not the files that were asked for; as in the original, it is a FileNotFoundError."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split, `{folder}/{split}-*.tfrec`.

    Attributes:
      pattern: The path with the wildcard, for messages.
      paths: The files with records, sorted by name; files of no bytes are left out.
      compressions: Of each file "", "GZIP" or "ZLIB", as its first bytes tell.
    """

    pattern: str
    paths: Sequence[str]
    compressions: Sequence[str]

    @classmethod
    def find(cls, dataset_path: str | os.PathLike[str], split: str) -> SplitFiles:
        """Returns the files of a split.

        Raises:
          UsageError: for a remote folder.
          MissingFilesError: when no file matches.
          DataError: when all files are empty, or one cannot be read.
        """
        folder = local_folder(dataset_path)
        pattern = os.path.join(folder, f"{split}-*.tfrec")
        found = sorted(glob.glob(f"{split}-*.tfrec", root_dir=folder))
        if not found:
            raise MissingFilesError(f"no file matches {pattern}; {content_of(folder, f'{split}-')}")
        paths = [path for path in (os.path.join(folder, name) for name in found) if os.path.getsize(path)]
        if not paths:
            raise DataError(f"{pattern}: all {len(found)} files are empty")
        return cls(pattern, paths, [compression_of(path) for path in paths])

    def records(self, *, shuffle_seed: int | None = None) -> tf.data.Dataset:
        """Returns a dataset of the serialized examples, string []. Eager, on the host.

        Args:
          shuffle_seed: For an order of the files that each pass draws anew, of which several are read in turn. None:
            one file after the other. The order of records is the same on every machine.
        """
        files = tf.data.Dataset.from_tensor_slices((list(self.paths), list(self.compressions)))
        shuffled = shuffle_seed is not None and len(self.paths) > 1
        if shuffled:
            files = files.shuffle(len(self.paths), seed=shuffle_seed)
        return files.interleave(
            _records_of_file,
            cycle_length=min(_READ_AT_ONCE, len(self.paths)) if shuffled else 1,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    def count(self) -> int:
        """Returns the number of records: of plain files from the headers, of compressed ones by reading them.

        Raises:
          DataError: when a file is cut, damaged or not a TFRecord file.
        """
        kinds = list(zip(self.paths, self.compressions, strict=True))
        plain, packed = ([one for one in kinds if bool(one[1]) is packed] for packed in (False, True))
        number = len(RecordFiles([path for path, _ in plain])) if plain else 0
        for path, kind in packed:
            number += number_of(tf.data.TFRecordDataset(path, compression_type=kind), path)
        return number


def number_of(dataset: tf.data.Dataset, name: str) -> int:
    """Returns the number of elements, found by reading them.

    Raises:
      DataError: when they cannot be read; it begins with `name`.
    """
    try:
        return int(dataset.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
    except tf.errors.OpError as error:
        raise DataError(f"{name} cannot be read: {error.message.splitlines()[0]}") from error


def local_folder(dataset_path: Any) -> str:
    """Returns the path of a data set's folder.

    Raises:
      UsageError: for a remote one, or what is no path.
    """
    if not isinstance(dataset_path, (str, os.PathLike)) or not os.fspath(dataset_path):
        raise UsageError(f"dataset_path={dataset_path!r} is not a path; give the folder with the .tfrec files")
    if is_remote(dataset_path):
        raise UsageError(f"dataset_path={os.fspath(dataset_path)} is remote, which is not supported; copy the files")
    return os.fspath(dataset_path)


def content_of(folder: str, wanted: str) -> str:
    """Returns what is in a folder, for the error about a file that is missing, and names that are near to it."""
    if not os.path.isdir(folder):
        return "there is no such folder"
    names = sorted(os.listdir(folder))
    if not names:
        return f"{folder} is empty"
    more = f", ... ({len(names)} in all)" if len(names) > _LISTED else ""
    splits = {name.rpartition("-")[0] for name in names if name.endswith(".tfrec") and "-" in name}
    near = near_names(wanted.rstrip("-"), splits) if wanted.endswith("-") else near_names(wanted, names)
    advice = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"the folder has {', '.join(names[:_LISTED])}{more}{advice}"


@tf.autograph.experimental.do_not_convert
def _records_of_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path, compression_type=compression)
