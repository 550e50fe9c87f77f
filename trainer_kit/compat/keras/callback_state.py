"""The state of Keras callbacks for checkpoints, and the files that they and the History write."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer_kit import files
from trainer_kit.compat.keras.keras_types import CSVLogger, History, KerasCallback
from trainer_kit.runtime.keras_internals import set_monitor_op
from trainer_kit.telemetry.scalars import as_scalar

_IGNORED_ATTRIBUTES = {"_model", "model", "params", "_params", "validation_data"}

# The callbacks that write files, with the attribute that names the file or folder.
_PATHS = {"CSVLogger": "filename", "ModelCheckpoint": "filepath", "TensorBoard": "log_dir"}
_HISTORY = "history.json"


class AttributeState:
    """The attributes of a callback that have changed since this object was created.

    It is created before `on_train_begin`. Numbers, texts, arrays, tuples, lists and dicts are
    state. Other attributes are left alone. What the program has set, such as a patience, is no
    state: a restart uses what the program sets then.

    Args:
      callback: The callback.
    """

    def __init__(self, callback: KerasCallback) -> None:
        self.callback = callback
        self._initial_values = _encode_attributes(callback)

    def get_changes(self) -> dict[str, Any]:
        """Returns the changed and the new attributes by name, in types that a checkpoint takes."""
        current_values = _encode_attributes(self.callback)
        current_texts = _format_attributes(current_values)
        initial_texts = _format_attributes(self._initial_values)

        changes = {}
        for name, value in current_values.items():
            if current_texts[name] != initial_texts.get(name):
                changes[name] = value
        return changes

    def restore(self, changes: Mapping[str, object]) -> None:
        """Sets the attributes to what they were when `get_changes` returned `changes`.

        Attributes that are no state, such as open files, stay.
        """
        current_values = _encode_attributes(self.callback)
        saved_values = {**self._initial_values, **changes}
        for name, value in saved_values.items():
            if name in changes or name in current_values:
                setattr(self.callback, name, _decode_value(value))

        if changes.get("best") is not None:
            set_monitor_op(self.callback)


def _encode_attributes(callback: KerasCallback) -> dict[str, Any]:
    """Returns the attributes that are state, encoded, by name."""
    attributes = {}
    for name, value in vars(callback).items():
        # Keras turns the sign of min_delta when it chooses the comparison, in the first epoch of
        # each process.
        has_turned = name == "min_delta" and hasattr(callback, "monitor_op")
        if name in _IGNORED_ATTRIBUTES or has_turned:
            continue
        # Values of other types are no state.
        with contextlib.suppress(TypeError):
            attributes[name] = _encode_value(value)
    return attributes


def _encode_value(value: object) -> Any:
    """Returns a value in lists, dicts with texts as keys, arrays and numbers.

    Raises:
      TypeError: For other types.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: np.array(value)}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if type(value) is tuple else "list"
        parts = [_encode_value(part) for part in value]
        return {kind: parts}
    if isinstance(value, dict):
        # JSON has texts as keys only.
        items = []
        for key, part in value.items():
            encoded_key = _encode_value(key)
            encoded_part = _encode_value(part)
            items.append([encoded_key, encoded_part])
        return {"dict": items}
    raise TypeError(type(value).__name__)


def _decode_value(value: object) -> Any:
    """Returns the value that `_encode_value` has encoded."""
    if not isinstance(value, dict):
        return value

    ((kind, content),) = value.items()
    if kind == "array":
        return np.array(content)
    if kind == "number":
        return np.asarray(content)[()]
    if kind == "dict":
        decoded = {}
        for key, part in content:
            decoded_part = _decode_value(part)
            decoded[_decode_value(key)] = decoded_part
        return decoded

    parts = [_decode_value(part) for part in content]
    if kind == "tuple":
        return tuple(parts)
    return parts


def _format_attributes(attributes: Mapping[str, object]) -> dict[str, str]:
    """Returns texts by which encoded attributes are compared. NaNs have the same text."""

    def fingerprint(array: np.ndarray) -> list[Any]:
        digest = hashlib.sha1(array.tobytes()).hexdigest()
        return [array.dtype.str, array.shape, digest]

    texts = {}
    for name, value in attributes.items():
        texts[name] = json.dumps(value, default=fingerprint)
    return texts


def csv_lengths(callbacks: Sequence[KerasCallback]) -> dict[str, int]:
    """Returns the length of the file of each CSVLogger in bytes, by its name."""
    lengths = {}
    for logger in _get_csv_loggers(callbacks):
        # The logger creates its file when the training begins.
        if os.path.exists(logger.filename):
            lengths[logger.filename] = os.path.getsize(logger.filename)
    return lengths


def _get_csv_loggers(callbacks: Sequence[KerasCallback]) -> list[CSVLogger]:
    loggers: list[Any] = []
    for callback in callbacks:
        if is_keras_callback(callback, "CSVLogger"):
            loggers.append(callback)
    return loggers


def truncate_csv_files(callbacks: Sequence[KerasCallback], lengths: Mapping[str, int]) -> None:
    """Drops the rows that CSVLoggers have written after a checkpoint.

    They add rows to those before it. By itself a CSVLogger begins a new file in each process, or
    with `append=True` adds to all that exists. Runs on the host.

    Args:
      callbacks: The callbacks, before `on_train_begin` or during the training.
      lengths: What `csv_lengths` returned for the checkpoint. A logger that is new in the run
        follows its own arguments.
    """
    for logger in _get_csv_loggers(callbacks):
        name = logger.filename
        if name not in lengths or not os.path.exists(name):
            continue

        size = os.path.getsize(name)
        length = min(size, lengths[name])
        logger.append = True
        logger.append_header = length == 0
        if length < size:
            os.truncate(name, length)
            # A file that is open has the position of the dropped rows.
            csv_file = getattr(logger, "csv_file", None)
            if csv_file is not None:
                csv_file.close()
                # The writer of tf_keras would continue with the closed file.
                logger.writer = None
                logger.on_train_begin()


def redirect_to_temporary_folders(callbacks: Sequence[KerasCallback]) -> None:
    """Sends the files of a worker other than the chief to temporary folders.

    Its callbacks are called all the same: reading variables can need all workers.
    """
    for callback in callbacks:
        for class_name, attribute in _PATHS.items():
            if is_keras_callback(callback, class_name):
                # The folder is deleted with the callback.
                folder = tempfile.TemporaryDirectory()
                vars(callback)["temporary_folder"] = folder
                original_path = getattr(callback, attribute)
                name = os.path.basename(original_path)
                path = os.path.join(folder.name, name)
                setattr(callback, attribute, path)


def write_history(model_dir: str, history: History) -> None:
    """Writes a History's epochs, counted from 0, and its values by name.

    An array is written as nested lists. A callback may have added a value that has no form in
    JSON. Its text is written then.

    Args:
      model_dir: The folder of the run, in which the file is history.json.
      history: The History.
    """

    def plain(value: object) -> Any:
        number = as_scalar(value)
        if number is not None:
            return number
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return array.tolist()
        return str(value)

    values = {}
    for name, epochs in history.history.items():
        values[name] = [plain(value) for value in epochs]
    record = {"epoch": list(history.epoch), "history": values}
    path = os.path.join(model_dir, _HISTORY)
    files.write_json(path, record)


def load_history(model_dir: str, history: History) -> None:
    """Puts the epochs and values that a run has recorded into a History.

    Does nothing if the run has recorded none.
    """
    path = os.path.join(model_dir, _HISTORY)
    record = files.read_json(path)
    if record is None:
        return

    history.epoch = list(record["epoch"])
    history.history = {}
    for name, plain_values in record["history"].items():
        values = []
        for value in plain_values:
            # An array was written as nested lists.
            if isinstance(value, list):
                value = np.asarray(value)
            values.append(value)
        history.history[name] = values


def is_keras_callback(callback: KerasCallback, class_name: str) -> bool:
    """Whether a callback is of the class of Keras with this name, or of a subclass."""
    # Not isinstance: the classes of two libraries have this name, and tf_keras may be missing.
    for cls in type(callback).__mro__:
        if cls.__name__ == class_name and is_defined_in_keras(cls):
            return True
    return False


def is_defined_in_keras(cls: type) -> bool:
    """Whether a class is defined in Keras 3 or tf_keras."""
    package = cls.__module__.partition(".")[0]
    return package in ("keras", "tf_keras")
