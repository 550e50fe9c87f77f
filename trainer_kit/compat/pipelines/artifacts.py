"""The artifacts of a job: the model as a SavedModel, and the history as a table. Both replace older ones whole."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trainer_kit import files
from trainer_kit.distribution.keras_internals import of_keras_2
from trainer_kit.errors import StorageError
from trainer_kit.folder_identity import make_folder


def write_history_csv(path: str, history: Mapping[str, Sequence[Any]]) -> None:
    """Writes the values of a history by name, as `pandas.DataFrame(history).to_csv(path)` does.

    A log that began later than others, such as one of a callback that was added for a restart, has empty cells before.

    Raises:
      StorageError: when the file cannot be written.
    """
    epochs = max(map(len, history.values()), default=0)
    columns = {name: [*[math.nan] * (epochs - len(values)), *values] for name, values in history.items()}
    files.write_text(path, pd.DataFrame(columns).to_csv())


def export_saved_model(model: Any, path: str) -> None:
    """Exports a model for inference, so that `tf.saved_model.load` reads it without trainer_kit.

    Runs eagerly, on the host.

    Args:
      model: A built model. One of Keras 3 is exported with an endpoint `serve`; one of tf_keras is saved in its format.
      path: The folder of the SavedModel.

    Raises:
      StorageError: when the folder cannot be written.
    """
    try:
        with _replaced_folder(path) as new:
            if of_keras_2(model):
                model.save(new, save_format="tf")
            else:
                model.export(new, verbose=False)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _replaced_folder(path: str) -> Iterator[str]:
    """Gives a new folder to write to, which then takes the place of `path`, with all its bytes on the disk."""
    parent, name = os.path.split(os.path.abspath(path))
    make_folder(parent)
    for left in Path(parent).glob(f".{name}.*.tmp"):  # of a start that was killed here
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".tmp", dir=parent) as temporary:
        new, old = os.path.join(temporary, "new"), os.path.join(temporary, "old")
        yield new
        _flush(new)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, old)
        os.rename(new, path)
        files.flush_folder(parent)


def _flush(folder: str) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as stream:
                os.fsync(stream.fileno())
        files.flush_folder(place)
