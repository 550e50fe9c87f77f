"""Keeps the files of CSVLogger in step with a run that resumes: no row is lost and none is there twice."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer_kit.callbacks.keras_hooks import is_stock

_PATHS = {"CSVLogger": "filename", "ModelCheckpoint": "filepath", "TensorBoard": "log_dir"}


def write_to_temporary_folders(callbacks: Sequence[Any]) -> None:
    """Sends the files of a worker other than the chief to temporary folders. Reading variables can need all workers."""
    for callback in callbacks:
        for class_name, attribute in _PATHS.items():
            if is_stock(callback, class_name):
                callback.temporary_folder = tempfile.TemporaryDirectory()
                path = os.path.join(callback.temporary_folder.name, os.path.basename(getattr(callback, attribute)))
                setattr(callback, attribute, path)


class CsvFiles:
    """The files of the CSVLoggers among callbacks of Keras. Used eagerly, on the host.

    Keras begins a new file in each process, or with `append=True` adds to what is there. A run that resumes has to add
    its rows to those before its checkpoint, and to drop those after it. So the state is the length of each file.

    Args:
      callbacks: The callbacks of Keras.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._loggers = [one for one in callbacks if is_stock(one, "CSVLogger")]

    @contextlib.contextmanager
    def kept(self, resumes: bool) -> Iterator[None]:
        """Has the loggers keep their files in `on_train_begin`, which is called inside, if the run resumes."""
        before = [one.append for one in self._loggers]
        for one in self._loggers:
            one.append = one.append or resumes
        yield
        for one, appends in zip(self._loggers, before, strict=True):
            one.append = appends

    def state(self) -> dict[str, int]:
        """Returns the length of each file in bytes, by its name."""
        return {one.filename: os.path.getsize(one.filename) for one in self._loggers if os.path.exists(one.filename)}

    def restore(self, lengths: Mapping[str, int]) -> None:
        """Cuts the files to what `state` returned, after `on_train_begin`; a file without a length begins again."""
        for one in self._loggers:
            if not os.path.exists(one.filename):
                continue
            whole = os.path.getsize(one.filename)
            length = min(whole, lengths.get(one.filename, whole if one.append else 0))
            os.truncate(one.filename, length)
            if isinstance(one.csv_file, io.IOBase) and not one.csv_file.closed:
                one.csv_file.seek(0, os.SEEK_END)
            one.append_header = length == 0
