"""The TFRecord files of a data set: which there are, whether they are compressed, and how many records they have."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError, UsageError, near_names
from trainer_kit.files import is_remote
from trainer_kit.inputs.sources.tfrecord_index import RecordFiles, compression_of
from trainer_kit.process.error_report import reason

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
            raise MissingFilesError(f"no file matches {pattern}; {_splits_of(folder, split)}")
        paths = [path for path in (os.path.join(folder, name) for name in found) if os.path.getsize(path)]
        if not paths:
            raise DataError(
                f"{pattern} matches only empty files, without a record: {', '.join(found[:_LISTED])}; write them again"
            )
        return cls(pattern, paths, [compression_of(path) for path in paths])

    def records(self, *, shuffle_seed: int | None = None) -> tf.data.Dataset:
        """Returns a dataset of the serialized examples, string []. Runs eagerly, on the host.

        Args:
          shuffle_seed: The seed of the order of the files. Each pass draws another order, and several files are read
            in turn. None: one file after the other. The order of records is the same on every machine.
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
        raise DataError(f"{name} cannot be read: {reason(error)[0]}") from error


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
        return "the folder is empty"
    more = f", ... ({len(names)} in all)" if len(names) > _LISTED else ""
    return f"the folder has {', '.join(names[:_LISTED])}{more}{_advice(wanted, names)}"


def _splits_of(folder: str, wanted: str) -> str:
    """Returns which splits are in a folder; what else is there if there is none."""
    names = glob.glob("*-*.tfrec", root_dir=folder)
    splits = Counter(name.partition("-")[0] for name in names)
    if not splits:
        return content_of(folder, f"{wanted}-00000.tfrec")
    listed = ", ".join(f"{split} (files: {number})" for split, number in sorted(splits.items())[:_LISTED])
    return f"the folder has the splits {listed}{_advice(wanted, splits)}"


def _advice(wanted: str, names: Iterable[str]) -> str:
    near = near_names(wanted, names)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@tf.autograph.experimental.do_not_convert
def _records_of_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path, compression_type=compression)
