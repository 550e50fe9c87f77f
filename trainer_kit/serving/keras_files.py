"""Loads weights from Keras files (`.weights.h5`, `.h5` and `.keras`) with Keras's own loaders."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.optimizers.per_variable import variable_path


def load_keras_file(model: Any, path: str) -> tuple[int, int]:
    """Loads the weights in a Keras file into `model`; returns its numbers of variables and parameters.

    Runs eagerly, in cross-replica context.

    Raises:
      UsageError: when there is no such file, or it does not fit; with Keras's message. The model is
        unchanged.
      StorageError: when the file is damaged.
    """
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    if not hasattr(model, "load_weights"):
        raise UsageError(f"{path} is a Keras file, but {type(model).__name__} is not a Keras model")
    variables = list(model.variables)
    before = [variable.numpy() for variable in variables]
    try:
        _load_strictly(model, path, before)
    except BaseException as error:  # Ctrl-C too
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        if not isinstance(error, Exception):
            raise
        reason = "\n".join(f"  {line}" for line in str(error).splitlines()[:24])
        if isinstance(error, OSError):
            raise StorageError(f"{path} cannot be read as a Keras file:\n{reason}") from error
        raise UsageError(
            f"{path} does not fit the model {type(model).__name__}; build the model as it was when"
            f" the file was saved; no weight was changed:\n{reason}"
        ) from error
    return len(variables), sum(int(value.size) for value in before)


def _load_strictly(model: Any, path: str, old_values: list[Any]) -> None:
    """Loads with Keras; raises ValueError for variables that Keras leaves out, perhaps with only a warning.

    All variables are set to NaN first; those that are still NaN afterwards were left out.
    """
    numbers = [
        (v, old)
        for v, old in zip(model.variables, old_values, strict=True)
        if old.dtype.kind == "f"
    ]
    for variable, old in numbers:
        variable.assign(np.full_like(old, np.nan))
    model.load_weights(path)
    missing = [
        variable for variable, old in numbers if old.size and np.isnan(variable.numpy()).all()
    ]
    if missing:
        rows = [
            (variable_path(one), "missing in the file", None, tuple(one.shape)) for one in missing
        ]
        raise ValueError(format_differences(sorted(rows, key=lambda row: row[0].rpartition("/"))))
