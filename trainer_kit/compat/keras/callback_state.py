"""What training has changed in the attributes and the CSV files of callbacks of Keras, for checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_kit.compat.keras.keras_batches import is_stock
from trainer_kit.runtime.keras_internals import choose_comparison

_NOT_STATE = {"_model", "model", "params", "_params", "validation_data"}
_PATHS = {"CSVLogger": "filename", "ModelCheckpoint": "filepath", "TensorBoard": "log_dir"}


class AttributeState:
    """The attributes of a callback that have changed since this object was made, before `on_train_begin`.

    Numbers, texts, arrays, tuples, lists and dicts are state. Other attributes are left alone. What
    the program has set, such as a patience, is no state: a restart uses what the program sets then.

    Args:
      owner: The callback.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._at_creation = _encoded_attributes(owner)
        self._after_train_begin = self._at_creation

    def begin(self) -> None:
        """Reads what `on_train_begin` has set: `restore` sets it where an older state lacks it."""
        self._after_train_begin = _encoded_attributes(self.owner)

    def changed(self) -> dict[str, Any]:
        """Returns the changed and the new attributes by name, in types that a checkpoint can hold."""
        return {
            name: value
            for name, value in _encoded_attributes(self.owner).items()
            if not _is_in(self._at_creation, name, value) or not _is_in(self._after_train_begin, name, value)
        }

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes to what they were when `changed` returned this; open files and the like stay."""
        now = _encoded_attributes(self.owner)
        for name, value in {**self._after_train_begin, **changed}.items():
            if name in changed or name in now or name not in vars(self.owner):
                setattr(self.owner, name, _decoded(value))
        if changed.get("best") is not None:
            choose_comparison(self.owner)


def _encoded_attributes(owner: Any) -> dict[str, Any]:
    attributes = {}
    for name, value in vars(owner).items():
        # Keras turns the sign of min_delta when it chooses the comparison, in the first epoch of each process.
        if name in _NOT_STATE or (name == "min_delta" and hasattr(owner, "monitor_op")):
            continue
        with contextlib.suppress(TypeError):
            attributes[name] = _encoded(value)
    return attributes


def _encoded(value: Any) -> Any:
    """Returns a value in lists, dicts with texts as keys, arrays and numbers; raises TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {"array" if isinstance(value, np.ndarray) else "number": np.array(value)}
    if isinstance(value, (list, tuple)):
        return {"tuple" if type(value) is tuple else "list": [_encoded(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(part)] for key, part in value.items()]}
    raise TypeError(type(value).__name__)


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return np.array(content)
    if kind == "number":
        return np.asarray(content)[()]
    if kind == "dict":
        return {_decoded(key): _decoded(part) for key, part in content}
    parts = [_decoded(part) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def _is_in(attributes: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in attributes and _is_same(attributes[name], value)


def _is_same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in now)
    if isinstance(now, list):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(now, np.ndarray):
        return before.dtype == now.dtype and np.array_equal(before, now, equal_nan=now.dtype.kind == "f")
    return bool(before == now)


class CsvFiles:
    """The files of the CSVLoggers among callbacks of Keras. Used eagerly, on the host.

    Keras begins a new file in each process, or with `append=True` adds to what is there. A run that
    resumes has to add its rows to those before its checkpoint, and to drop those after it. So the
    state is the length of each file.

    Args:
      callbacks: The callbacks of Keras.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._loggers = [one for one in callbacks if is_stock(one, "CSVLogger")]

    @contextlib.contextmanager
    def kept(self, resumes: bool) -> Iterator[None]:
        """Has the loggers keep their files in `on_train_begin`, which is called inside, if the run resumes."""
        choices = [logger.append for logger in self._loggers]
        for logger in self._loggers:
            logger.append = logger.append or resumes
        yield
        for logger, append in zip(self._loggers, choices, strict=True):
            logger.append = append

    def state(self) -> dict[str, int]:
        """Returns the length of each file in bytes, by its name."""
        names = [logger.filename for logger in self._loggers if os.path.exists(logger.filename)]
        return {name: os.path.getsize(name) for name in names}

    def restore(self, lengths: Mapping[str, int]) -> None:
        """Cuts the files to what `state` returned, after `on_train_begin`; a file without a length begins again."""
        for logger in self._loggers:
            if not os.path.exists(logger.filename):
                continue
            size = os.path.getsize(logger.filename)
            length = min(size, lengths.get(logger.filename, size if logger.append else 0))
            os.truncate(logger.filename, length)
            if isinstance(logger.csv_file, io.IOBase) and not logger.csv_file.closed:
                logger.csv_file.seek(0, os.SEEK_END)
            logger.append_header = length == 0


def write_to_temporary_folders(callbacks: Sequence[Any]) -> None:
    """Sends the files of a worker other than the chief to temporary folders. Reading variables can need all workers."""
    for callback in callbacks:
        for class_name, attribute in _PATHS.items():
            if is_stock(callback, class_name):
                callback.temporary_folder = tempfile.TemporaryDirectory()
                name = os.path.basename(getattr(callback, attribute))
                setattr(callback, attribute, os.path.join(callback.temporary_folder.name, name))
