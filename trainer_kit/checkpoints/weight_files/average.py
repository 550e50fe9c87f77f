"""Averages the variables of several files of weights."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.weight_files.compare import common_names, differences
from trainer_kit.checkpoints.weight_files.keras_file import WEIGHTS, KerasFile, ending, is_keras_file
from trainer_kit.checkpoints.weight_files.new_file import new_file
from trainer_kit.checkpoints.weight_files.tensorflow_file import SAVED_MODEL, TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import WeightFile
from trainer_kit.errors import UsageError


def write_average(files: Sequence[WeightFile], output: str) -> int:
    """Writes a copy of the last file with the mean of each variable of floating point; returns their number.

    Runs eagerly.

    The sum is computed in float64. Other values, such as steps, are those of the last file.

    Args:
      files: Files of weights of one kind, with the same variables.
      output: The path of the new file, or the prefix of the new checkpoint.

    Raises:
      UsageError: when the files differ in their variables, or the output exists.
      StorageError: when a file cannot be read or written.
    """
    last = files[-1]
    if saved := [file.path for file in files if file.kind == SAVED_MODEL]:
        raise UsageError(f"{saved[0]} belongs to a SavedModel, which is not averaged; average checkpoints, and export")
    for file in files[:-1]:
        _check_same(file, last)
    if isinstance(last, KerasFile) and ending(last.path) != ending(output):
        raise UsageError(f"--output: {output} has to end in {ending(last.path)}, as {last.path} does")
    if not isinstance(last, KerasFile) and is_keras_file(output):
        raise UsageError(
            f"--output: {output} ends as a file of Keras does, but the average is {last.kind}; give a path without an "
            "ending"
        )
    averaged = [name for name, dtype in last.dtypes.items() if tf.as_dtype(dtype).is_floating]
    pairs = [common_names(file, last) for file in files]
    names = [{name: theirs[common] for common, name in ours.items()} for theirs, ours in pairs]
    values = {name: _mean([file.read(of[name]) for file, of in zip(files, names, strict=True)]) for name in averaged}
    with new_file(output) as path:
        if isinstance(last, KerasFile):
            _write_keras(last, path, values)
        elif isinstance(last, TensorFlowFile):
            last.write_copy(path, values)
    return len(averaged)


def _check_same(file: WeightFile, last: WeightFile) -> None:
    for name, what, detail in differences(file, last, values=False):
        raise UsageError(
            f"{file.path} and {last.path} cannot be averaged: {name} is {what} {detail}".rstrip()
            + "; `trainer-kit checkpoint diff` lists all differences"
        )


def _mean(values: Sequence[Any]) -> Any:
    total = sum(np.asarray(value, np.float64) for value in values)
    return np.asarray(total / len(values)).astype(values[-1].dtype)


def _write_keras(file: KerasFile, path: str, values: Mapping[str, Any]) -> None:
    inside = f"{path}.{WEIGHTS}" if path.endswith(".keras") else path
    if inside == path:
        shutil.copyfile(file.path, path)
    else:
        with zipfile.ZipFile(file.path) as archive, open(inside, "wb") as stream:
            stream.write(archive.read(WEIGHTS))
    with h5py.File(inside, "r+") as weights:
        for name, value in values.items():
            weights[file.datasets[name]][...] = value
    if inside != path:
        with zipfile.ZipFile(file.path) as archive, zipfile.ZipFile(path, "w") as copy:
            for item in archive.infolist():
                if item.filename != WEIGHTS:
                    copy.writestr(item, archive.read(item))
            copy.write(inside, WEIGHTS)
        os.remove(inside)
