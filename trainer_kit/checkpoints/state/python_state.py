"""PythonState: what a run has to remember beside its variables, as one string variable of its checkpoint.

TensorFlow serialises Python state in the thread of the save, later than it copies the variables. So the parts are
turned into JSON on the caller's thread, just before a save, and travel as a variable. No part may hold a wall-clock
value: a run that was killed and one that was not have equal checkpoints.
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
    """Named parts, each with a function that returns its value and one that takes it back.

    Attributes:
      variable: string scalar, on the host; what a checkpoint holds.
    """

    def __init__(self) -> None:
        # In a thread of its own, where no strategy is: one of several workers would broadcast its value, and cannot
        # broadcast a string.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            self.variable = thread.submit(_variable).result()
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def add(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Adds a part.

        Args:
          name: its key; one that is there already is replaced.
          get: returns what JSON can hold; arrays and variables, too, which come back as NumPy arrays.
          put: takes what `get` returned when the checkpoint was made; None when the checkpoint has no such part.
        """
        self._parts[name] = (get, put)

    def store(self) -> None:
        """Puts all parts into the variable; eager, on the host, right before a save.

        Raises:
          UsageError: when a part returns what cannot be held.
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
        """Hands all parts what the variable holds; eager, on the host, after a restore."""
        text = self.variable.numpy()
        values = json.loads(text, object_hook=_decoded) if text else {}
        if unknown := sorted(values.keys() - self._parts.keys()):
            _LOG.warning("the checkpoint holds the state of what this run does not have: %s", ", ".join(unknown))
        for name, (_, put) in self._parts.items():
            put(values.get(name))

    def load_part(self, path: str, name: str) -> None:
        """Hands one part what the checkpoint at `path` holds of it, if there is such a part; eager.

        Best weights hold none; a warning says so.

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
            _LOG.warning("%s holds no state of the %s: it keeps the state that it has", path, name)
        else:
            self._parts[name][1](value)

    def clear(self) -> None:
        """Forgets what was loaded, for a run that starts anew."""
        self.variable.assign("")
        self.load()


def _encoded(value: Any) -> Any:
    """Returns an array or a variable as JSON can hold it, bit by bit."""
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
    """Returns the array that `_encoded` was given; any other dict as it is."""
    if value.keys() != {_ARRAY}:
        return value
    held = value[_ARRAY]
    data = np.frombuffer(base64.b64decode(held["data"]), tf.as_dtype(held["dtype"]).as_numpy_dtype)
    return data.reshape(held["shape"]).copy()


def _variable() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable("", trainable=False, name="run_state")


def check_state(name: str, value: Any) -> None:
    """Raises UsageError when a checkpoint cannot hold `value`, the state of what is called `name`."""
    try:
        json.dumps(value, default=_encoded)
        _check_keys(value)
    except (TypeError, ValueError) as error:
        advice = "return numbers, texts, arrays, lists, and dicts with texts as keys from state()"
        raise UsageError(f"the state of {name} cannot be saved: {error}; {advice}") from None


def _check_keys(value: Any) -> None:
    """Raises TypeError for a dict with keys that are no texts, which would come back as texts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict with the key {key!r}")
            _check_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner)
