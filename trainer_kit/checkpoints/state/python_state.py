"""PythonState: the Python state of a run, saved as one string variable of its checkpoint.

TensorFlow serialises Python state in the save's thread, after it has copied the variables. So the parts are turned
into JSON on the caller's thread, just before a save, and saved as a variable. No part may hold a wall-clock value: a
killed run and one that was not killed must have equal checkpoints.
"""

from __future__ import annotations

import base64
import concurrent.futures
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError

_KEY = "run_state/.ATTRIBUTES/VARIABLE_VALUE"  # of the variable, in a checkpoint
_ARRAY = "trainer_kit/array"
_DTYPES = {one.name for one in vars(tf.dtypes).values() if isinstance(one, tf.DType)}
_DTYPES -= {"string", "resource", "variant"}
_LOG = logging.getLogger(__name__)


class PythonState:
    """Named parts, each with a function that returns its value and one that restores it.

    Attributes:
      variable: The string scalar that a checkpoint holds, on the host.
    """

    def __init__(self) -> None:
        # In a separate thread without a strategy: a strategy of several workers would broadcast the value, and strings
        # cannot be broadcast.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            self.variable = thread.submit(_variable).result()
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def add(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Adds a part.

        Args:
          name: The part's key; it replaces an earlier part of this name.
          get: Returns a value that JSON can hold; arrays and variables are allowed and come back as NumPy arrays.
          put: Takes the value that `get` returned at the save; None when the checkpoint has no such part.
        """
        self._parts[name] = (get, put)

    def store(self) -> None:
        """Writes all parts into the variable; runs eagerly, on the host, right before a save.

        Raises:
          UsageError: when a part returns a value that cannot be saved.
        """
        values = {name: get() for name, (get, _) in self._parts.items()}
        try:
            text = json.dumps(values, sort_keys=True, default=_encoded)
        except (TypeError, ValueError):
            for name, value in values.items():
                check_state(name, value)
            raise
        self.variable.assign(text)

    def load(self) -> None:
        """Restores all parts from the variable; runs eagerly, on the host, after a restore."""
        text = self.variable.numpy()
        values = json.loads(text, object_hook=_decoded) if text else {}
        if unknown := sorted(values.keys() - self._parts.keys()):
            _LOG.warning(
                "the checkpoint holds state of parts that this run does not have, and it is not used: %s",
                ", ".join(unknown),
            )
        for name, (_, put) in self._parts.items():
            put(values.get(name))

    def load_part(self, path: str, name: str) -> None:
        """Restores one part, if it exists here, from the checkpoint at `path`; runs eagerly.

        Best weights hold no parts; a warning says so.

        Raises:
          StorageError: when the checkpoint cannot be read.
        """
        if name not in self._parts:
            return
        try:
            reader = tf.train.load_checkpoint(path)
            text = reader.get_tensor(_KEY) if reader.has_tensor(_KEY) else b""
        except (tf.errors.OpError, ValueError, IndexError) as error:
            raise StorageError(f"{path} is gone or damaged: {error}") from error
        value = json.loads(text or "{}", object_hook=_decoded).get(name)
        if value is None:
            _LOG.warning("the checkpoint %s holds no state of the %s; the %s is used as it is now", path, name, name)
        else:
            self._parts[name][1](value)

    def clear(self) -> None:
        """Clears the loaded state, for a run that starts from step 0."""
        self.variable.assign("")
        self.load()


def _encoded(value: Any) -> Any:
    """Returns an array or a variable in a form for JSON that keeps every bit."""
    if not hasattr(value, "__array__"):
        raise TypeError(f"a value of type {type(value).__name__} cannot be saved")
    array = np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"an array of {array.dtype} cannot be saved")
    if isinstance(value, np.generic):
        return value.item()
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}}


def _decoded(value: dict[str, Any]) -> Any:
    """Returns the array that `_encoded` encoded; any other dict unchanged."""
    if value.keys() != {_ARRAY}:
        return value
    held = value[_ARRAY]
    data = np.frombuffer(base64.b64decode(held["data"]), tf.as_dtype(held["dtype"]).as_numpy_dtype)
    return data.reshape(held["shape"]).copy()


def _variable() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable("", trainable=False, name="run_state")


def check_state(name: str, value: Any) -> None:
    """Raises UsageError when a checkpoint cannot hold `value`, the state of the part `name`."""
    try:
        json.dumps(value, default=_encoded)
        _check_keys(value)
    except (TypeError, ValueError) as error:
        advice = "return numbers, strings, arrays, lists or dicts with string keys from state()"
        raise UsageError(f"the state of {name} cannot be saved: {error}; {advice}") from None


def _check_keys(value: Any) -> None:
    """Raises TypeError for a dict with keys that are not strings, since JSON would return strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r}, which is not a string")
            _check_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner)
