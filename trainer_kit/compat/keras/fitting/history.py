"""The history of a fit: a file in the folder of the run, and Keras's History object."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from trainer_kit import files
from trainer_kit.telemetry.scalars import as_scalar

FILE = "history.json"


def write_history(model_dir: str, history: Any) -> None:
    """Writes a History's epochs, counted from 0, and its values by name to `model_dir`.

    An array is written as nested lists. Of what a callback has added, JSON may have no form: its text is written then.
    """
    values = {name: [_plain(value) for value in of_epochs] for name, of_epochs in history.history.items()}
    files.write_json(os.path.join(model_dir, FILE), {"epoch": list(history.epoch), "history": values})


def read_history(model_dir: str, history: Any) -> None:
    """Puts the epochs and values that a run has recorded into a History; does nothing if there are none."""
    found = files.read_json(os.path.join(model_dir, FILE))
    if found is not None:
        history.epoch = list(found["epoch"])
        history.history = {name: [_array(value) for value in values] for name, values in found["history"].items()}


def _plain(value: Any) -> Any:
    if (number := as_scalar(value)) is not None:
        return number
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biuf" else str(value)


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value
