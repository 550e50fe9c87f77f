"""Writes new files of weights: averages, and copies with other names.

A new file never replaces an existing one, and it is complete or does not exist.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.weight_files.compare import common_names, compare_weights
from trainer_kit.checkpoints.weight_files.keras_file import ending, is_keras_file
from trainer_kit.checkpoints.weight_files.tensorflow_file import SAVED_MODEL, TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile
from trainer_kit.errors import StorageError, UsageError


def write_average(files: Sequence[WeightFile], output: str) -> int:
    """Writes a copy of the last file with the mean of each variable of floating point.

    The mean is computed in float64. Other values, such as steps, are those of the last file. Runs
    eagerly.

    Args:
      files: Files of weights of one kind, with the same variables.
      output: The path of the new file, or the prefix of the new checkpoint.

    Returns:
      The number of variables of floating point.

    Raises:
      UsageError: when the files differ in their variables, or the output exists.
      StorageError: when a file cannot be read or written.
    """
    last = files[-1]
    names_by_file = []
    for file in files:
        rows, _ = compare_weights(file, last, values=False)
        if rows:
            difference = " ".join(rows[0])
            raise UsageError(f"{file.path} and {last.path} cannot be averaged: {difference}")
        file_names, last_names = common_names(file, last)
        # From the name in the last file to the name in this one
        names = {last_name: file_names[name] for name, last_name in last_names.items()}
        names_by_file.append(names)

    has_keras_file = is_keras_file(last.path) or is_keras_file(output)
    if has_keras_file and ending(output) != ending(last.path):
        raise UsageError(f"--output: {output} has to end as {last.path} does")

    means: dict[str, np.ndarray] = {}
    for name, dtype in last.dtypes.items():
        if not tf.as_dtype(dtype).is_floating:
            continue
        values = []
        for file, file_names in zip(files, names_by_file, strict=True):
            value = file.read_tensor(file_names[name])
            values.append(value)
        wide_values = [np.asarray(value, np.float64) for value in values]
        mean = np.mean(wide_values, axis=0)
        last_value = values[-1]
        means[name] = mean.astype(last_value.dtype)

    with create_output_file(output) as path:
        last.write_copy(path, means)
    return len(means)


def write_renamed(file: WeightFile, names: Mapping[str, str], output: str) -> None:
    """Writes a checkpoint of trainer_kit's form with the variables of a file under other names.

    The part before the first slash of a name is a section of the checkpoint, such as model or
    optimizer. Names of a file without sections are put into the section model. Runs eagerly.

    Args:
      file: The file of weights.
      names: A dict from new name to name in the file.
      output: The prefix of the new checkpoint.

    Raises:
      UsageError: when the output exists.
      StorageError: when a file cannot be read or written.
    """
    has_sections = False
    if isinstance(file, TensorFlowFile):
        has_sections = file.has_graph and file.kind != SAVED_MODEL

    sections: dict[str, Any] = {}
    for new_name, name in names.items():
        target = new_name
        if not has_sections:
            model_name = new_name.removeprefix(MODEL)
            target = f"{MODEL}{model_name}"
        value = file.read_tensor(name)
        variable = tf.Variable(value, trainable=False)

        section, _, inner = target.partition("/")
        if inner:
            entries = sections.setdefault(section, {})
            entries[inner] = variable
        else:
            sections[section] = variable

    with create_output_file(output) as path:
        checkpoint = tf.train.Checkpoint(**sections)
        checkpoint.write(path)


@contextlib.contextmanager
def create_output_file(output: str) -> Iterator[str]:
    """Yields a path to write to, and then renames what was written there to `output`.

    This is a file, or the files of a prefix. The files of a checkpoint are renamed one by one, the
    index last, since a checkpoint without an index does not exist.

    Args:
      output: The path of the new file, or the prefix of the new checkpoint, without a slash at its
        end.

    Raises:
      UsageError: when it exists already.
      StorageError: when it cannot be written.
    """
    # The output is a file, or the prefix of the files of a checkpoint.
    pattern = f"{glob.escape(output)}.*"
    if os.path.exists(output) or glob.glob(pattern):
        raise UsageError(
            f"--output: {output} exists, and no file is overwritten; give another path"
        )

    absolute_output = os.path.abspath(output)
    folder, name = os.path.split(absolute_output)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{name}.", suffix=".tmp", dir=folder
        ) as temporary_folder:
            yield os.path.join(temporary_folder, name)

            file_names = os.listdir(temporary_folder)
            file_names.sort(key=lambda file_name: file_name.endswith(".index"))
            for file_name in file_names:
                temporary_path = os.path.join(temporary_folder, file_name)
                target_path = os.path.join(folder, file_name)
                os.rename(temporary_path, target_path)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{output} cannot be written: {reason}") from error
