"""Loads weights from Keras files (`.weights.h5`, `.h5` and `.keras`) with Keras's own loaders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.typing import Model, Variable


def load_keras_file(model: Model, path: str) -> tuple[int, int]:
    """Loads the weights in a Keras file into `model`.

    Runs eagerly, in cross-replica context.

    Returns:
      The numbers of variables and of parameters of the model.

    Raises:
      UsageError: when the file does not exist, or does not fit, with Keras's message. The model is
        unchanged.
      StorageError: when the file is damaged.
    """
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    if not hasattr(model, "load_weights"):
        raise UsageError(f"{path} is a Keras file, but {type(model).__name__} is not a Keras model")
    variables = list(model.variables)
    old_values = [variable.numpy() for variable in variables]

    try:
        _load_strictly(model.load_weights, path, variables, old_values)
    except BaseException as error:
        # After Ctrl-C the old values come back, too.
        for variable, value in zip(variables, old_values, strict=True):
            variable.assign(value)
        if not isinstance(error, Exception):
            raise
        first_lines = str(error).splitlines()[:24]
        reason = "\n".join(f"  {line}" for line in first_lines)
        if isinstance(error, OSError):
            raise StorageError(f"{path} cannot be read as a Keras file:\n{reason}") from error
        raise UsageError(
            f"{path} does not fit the model {type(model).__name__}; build the model as it was when"
            f" the file was saved; no weight was changed:\n{reason}"
        ) from error

    return len(variables), sum(value.size for value in old_values)


def _load_strictly(
    load_weights: Callable[[str], object],
    path: str,
    variables: Sequence[Variable],
    old_values: Sequence[np.ndarray],
) -> None:
    """Loads a file with Keras, and raises ValueError for variables that Keras leaves out.

    Keras may leave them out with only a warning. Variables of floating point are set to NaN first.
    Those that are still NaN afterwards were left out.
    """
    floats = []
    for variable, old_value in zip(variables, old_values, strict=True):
        if old_value.dtype.kind == "f":
            nan_value = np.full_like(old_value, np.nan)
            variable.assign(nan_value)
            floats.append(variable)

    load_weights(path)

    rows = []
    for variable in floats:
        value = variable.numpy()
        if value.size and np.isnan(value).all():
            name = variable_path(variable)
            shape = tuple(variable.shape)
            rows.append((name, "missing in the file", None, shape))
    if rows:
        # Rows of one layer follow one another.
        rows.sort(key=lambda row: row[0].rpartition("/"))
        table = format_differences(rows)
        raise ValueError(table)
