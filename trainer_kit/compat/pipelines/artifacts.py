"""The artifacts of a job: the model as a SavedModel, and the history as a table.

Both replace older ones as a whole.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import pandas as pd

from trainer_kit import files
from trainer_kit.errors import StorageError
from trainer_kit.runtime.keras_internals import is_keras_2_model

if TYPE_CHECKING:
    import tensorflow as tf


def write_history_csv(path: str, history: Mapping[str, Sequence[object]]) -> None:
    """Writes the values of a history by name, as `pandas.DataFrame(history).to_csv(path)` does.

    A log that began later than others, such as one of a callback that was added for a restart, has
    empty cells before. Runs on the host.

    Raises:
      StorageError: When the file cannot be written.
    """
    epochs = max(map(len, history.values()), default=0)
    columns: dict[str, list[object]] = {}
    for name, values in history.items():
        cells: list[object] = [math.nan] * (epochs - len(values))
        cells.extend(values)
        columns[name] = cells

    table = pd.DataFrame(columns)
    files.write_text(path, table.to_csv())


def export_saved_model(model: keras.Model | tf.keras.Model, path: str) -> None:
    """Exports a model for inference, so that `tf.saved_model.load` reads it without trainer_kit.

    Runs eagerly, on the host.

    Args:
      model: A built model. One of Keras 3 is exported with an endpoint `serve`. One of tf_keras is
        saved in its format.
      path: The folder of the SavedModel.

    Raises:
      StorageError: When the folder cannot be written.
    """
    parent = os.path.dirname(path)
    temporary_path = f"{path}.tmp"
    old_path = f"{path}.old"
    try:
        os.makedirs(parent, exist_ok=True)
        # A start that was killed here has left them.
        _remove(temporary_path, old_path)
        if is_keras_2_model(model):
            model.save(temporary_path, save_format="tf")
        else:
            inputs = getattr(model, "input", None)
            # A Sequential has no structure of inputs.
            if isinstance(model, keras.Sequential):
                inputs = model.inputs[0]
            # Layers of augmentation draw random numbers unless they are told not to.
            if inputs is not None:
                model = keras.Model(inputs, model(inputs, training=False))
            model.export(temporary_path, verbose=False)

        files.flush_tree(temporary_path)

        # A folder that is not empty cannot be replaced by a rename.
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, old_path)
        os.rename(temporary_path, path)
        files.flush_folder(parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        _remove(temporary_path, old_path)


def _remove(*folders: str) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
