"""The artifacts of a job: the model as a SavedModel, and the history as a table.

Both replace older ones as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import pandas as pd

from trainer_kit import files
from trainer_kit.runtime.keras_internals import is_keras_2_model
from trainer_kit.serving.model_export import publish_folder

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
    columns = {}
    for name, values in history.items():
        first_epoch = epochs - len(values)
        columns[name] = pd.Series(values, range(first_epoch, epochs))

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
    with publish_folder(Path(path), replaces=True) as folder:
        if is_keras_2_model(model):
            model.save(folder, save_format="tf")
        else:
            inputs = getattr(model, "input", None)
            # A Sequential has no structure of inputs.
            if isinstance(model, keras.Sequential):
                inputs = model.inputs[0]
            # Layers of augmentation draw random numbers unless they are told not to.
            if inputs is not None:
                model = keras.Model(inputs, model(inputs, training=False))
            model.export(folder, verbose=False)
