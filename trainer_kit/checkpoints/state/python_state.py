"""PythonState: the Python state of a run, saved in variables of its checkpoint.

There is one string variable, and one variable for each array. TensorFlow serialises Python state in
the save's thread, after it has copied the variables. So the parts are turned into JSON on the
caller's thread, just before a save, and saved as a variable. Arrays in them, such as the separate
values of each replica, become variables, and the JSON has their numbers. No part may contain a
wall-clock value, since a killed run and one that was not killed must have equal checkpoints.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.errors import UsageError
from trainer_kit.runtime.replica_values import decode_array

# The section of a checkpoint with the arrays
ARRAYS = "run_arrays"
# The key of the string variable in a checkpoint
_KEY = "run_state/.ATTRIBUTES/VARIABLE_VALUE"
# The key of an array's number in the JSON
_ARRAY = "trainer_kit/array"
# The dtypes of the arrays that a variable can contain
_DTYPES = {dtype.name for dtype in vars(tf.dtypes).values() if isinstance(dtype, tf.DType)}
_DTYPES -= {"string", "resource", "variant"}
_LOG = logging.getLogger(__name__)


class PythonState:
    """Named parts, each with a function that returns its value and one that restores it.

    Attributes:
      variable: The string scalar that a checkpoint contains, on the host.
      arrays: The section of checkpoints that contains the arrays as attributes, by number.
      reports_unused_parts: Whether a restore warns of parts of the checkpoint that do not exist
        here.
    """

    reports_unused_parts = True

    def __init__(self) -> None:
        (self.variable,) = _create_on_host([""], "run_state")
        self.arrays = tf.Module()
        self._array_variables: list[tf.Variable] = []
        self._parts: dict[str, tuple[Callable[[], object], Callable[[Any], None]]] = {}

    def add(
        self, name: str, get_state: Callable[[], object], restore_state: Callable[[Any], None]
    ) -> None:
        """Adds a part.

        Args:
          name: The part's key. It replaces an earlier part of this name.
          get_state: Returns a value that JSON can represent. Arrays and variables are allowed and
            come back as NumPy arrays.
          restore_state: Takes the value that `get_state` returned at the save, or None when the
            checkpoint has no such part.
        """
        self._parts[name] = (get_state, restore_state)

    def store(self) -> bool:
        """Writes all parts into the variables, right before a save. Runs eagerly, on the host.

        Returns:
          Whether the section of arrays has other variables than before.

        Raises:
          UsageError: when a part returns a value that cannot be saved.
        """
        values = {}
        for name, (get_state, _) in self._parts.items():
            values[name] = get_state()

        arrays: list[np.ndarray] = []
        encode_value = functools.partial(_encode, arrays)
        try:
            text = json.dumps(values, sort_keys=True, default=encode_value)
        except (TypeError, ValueError):
            # The error of `check_state` names the part.
            for name, value in values.items():
                check_state(name, value)
            raise
        self.variable.assign(text)

        # The variables stay if they fit, since the saver knows only those of its first save.
        array_specs = [(array.dtype, array.shape) for array in arrays]
        variable_specs = []
        for variable in self._array_variables:
            dtype = variable.dtype.as_numpy_dtype
            shape = tuple(variable.shape)
            variable_specs.append((dtype, shape))
        if array_specs == variable_specs:
            for variable, array in zip(self._array_variables, arrays, strict=True):
                variable.assign(array)
            return False

        for number in range(len(self._array_variables)):
            delattr(self.arrays, str(number))
        self._array_variables = _create_on_host(arrays, "run_array")
        for number, variable in enumerate(self._array_variables):
            setattr(self.arrays, str(number), variable)
        return True

    def load(self, graph: CheckpointGraph) -> None:
        """Restores all parts after the variable was restored. Runs eagerly, on the host.

        Args:
          graph: The restored checkpoint, which contains the arrays.

        Raises:
          StorageError: when the checkpoint cannot be read.
        """
        text = self.variable.numpy()
        values = _decode(text, graph)
        self._restore_parts(values)

    def clear(self) -> None:
        """Clears the loaded state, for a run that starts from step 0."""
        self.variable.assign("")
        self._restore_parts({})

    def _restore_parts(self, values: Mapping[str, object]) -> None:
        unused_names = values.keys() - self._parts.keys()
        if unused_names and self.reports_unused_parts:
            _LOG.warning(
                "the checkpoint holds state of parts that this run does not have, "
                "and it is not used: %s",
                ", ".join(sorted(unused_names)),
            )
        for name, (_, restore_state) in self._parts.items():
            restore_state(values.get(name))

    def load_part(self, graph: CheckpointGraph, name: str) -> None:
        """Restores one part, if it exists here, from a checkpoint. Runs eagerly.

        Best weights contain no parts, and a warning says so.

        Raises:
          StorageError: when the checkpoint cannot be read.
        """
        if name not in self._parts:
            return
        has_state = _KEY in graph.shapes
        text = graph.value(_KEY) if has_state else b""
        values = _decode(text, graph)
        value = values.get(name)
        if value is None:
            _LOG.warning(
                "the checkpoint %s holds no state of the %s; the %s is used as it is now",
                graph.prefix,
                name,
                name,
            )
        else:
            _, restore_state = self._parts[name]
            restore_state(value)


def _encode(arrays: list[np.ndarray], value: object) -> object:
    """Adds the value of an array or a variable to `arrays`.

    Returns its number, in a form for JSON. A NumPy scalar becomes a number of Python instead.
    """
    if not hasattr(value, "__array__"):
        type_name = type(value).__name__
        raise TypeError(f"a value of type {type_name} cannot be saved")
    array = np.asarray(value)
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"an array of {array.dtype} cannot be saved")
    if isinstance(value, np.generic):
        return value.item()
    number = len(arrays)
    arrays.append(array)
    return {_ARRAY: number}


def _decode(text: bytes, graph: CheckpointGraph) -> dict[str, Any]:
    """Returns the values of all parts from the JSON of a checkpoint, with its arrays.

    Raises:
      StorageError: when the checkpoint cannot be read.
    """
    arrays: dict[str, np.ndarray] = {}

    def find_array(value: dict[str, Any]) -> object:
        if value.keys() != {_ARRAY}:
            return value
        # An earlier version wrote the array into the JSON itself.
        if isinstance(value[_ARRAY], dict):
            return decode_array(value[_ARRAY])
        if not arrays:
            keys = graph.get_section_keys(ARRAYS)
            for name, key in keys.items():
                arrays[name] = graph.value(key)
        number = str(value[_ARRAY])
        return arrays[number]

    values: dict[str, Any] = {}
    if text:
        values = json.loads(text, object_hook=find_array)
    return values


def _create_on_host(values: Sequence[str | np.ndarray], name: str) -> list[tf.Variable]:
    """Returns variables on the host that belong to no strategy.

    They are created in a separate thread, since a strategy of several workers would broadcast the
    values, and strings cannot be broadcast.
    """

    def create() -> list[tf.Variable]:
        with tf.device("CPU:0"):
            return [tf.Variable(value, trainable=False, name=name) for value in values]

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(create).result()


def check_state(name: str, value: object) -> None:
    """Checks that a checkpoint can contain `value`, the state of the part `name`.

    Raises:
      UsageError: when it cannot.
    """
    encode_value = functools.partial(_encode, [])
    try:
        json.dumps(value, default=encode_value)
        _check_keys(value)
    except (TypeError, ValueError) as error:
        advice = "return numbers, strings, arrays, lists or dicts with string keys from state()"
        raise UsageError(f"the state of {name} cannot be saved: {error}; {advice}") from None


def _check_keys(value: object) -> None:
    """Raises TypeError for a dict with keys that are not strings.

    JSON would return strings.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r}, which is not a string")
            _check_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner)
