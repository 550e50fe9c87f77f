"""AttributeState: what training has changed in the attributes of a callback of Keras, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer_kit.distribution.keras_internals import choose_comparison

_NOT_STATE = {"_model", "model", "params", "_params", "validation_data"}


class AttributeState:
    """The attributes of a callback that have changed since this object was made, before `on_train_begin`.

    Numbers, texts, arrays, tuples, lists and dicts are state; other attributes are left alone. What the program has
    set, such as a patience, is no state: a restart uses what the program sets then.

    Args:
      owner: The callback.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._at_creation = self._after_train_begin = _encoded_attributes(owner)

    def begin(self) -> None:
        """Notes what `on_train_begin` has set, which `restore` leaves alone where an older state does not hold it."""
        self._after_train_begin = _encoded_attributes(self.owner)

    def changed(self) -> dict[str, Any]:
        """Returns the changed and the new attributes by name, in types that a checkpoint can hold."""
        now = _encoded_attributes(self.owner)
        old = (self._at_creation, self._after_train_begin)
        return {k: value for k, value in now.items() if any(not _same(value, one.get(k, _Absent)) for one in old)}

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes to what they were when `changed` returned this; open files and the like stay."""
        open_objects = vars(self.owner).keys() - _encoded_attributes(self.owner).keys()
        for name, value in {**self._after_train_begin, **changed}.items():
            if name in changed or name not in open_objects:
                setattr(self.owner, name, _decoded(value))
        if changed.get("best") is not None:
            choose_comparison(self.owner)


class _Absent: ...


def _encoded_attributes(owner: Any) -> dict[str, Any]:
    found = {}
    # Keras turns the sign of min_delta when it chooses the comparison, in the first epoch of each process.
    left_out = _NOT_STATE | ({"min_delta"} if hasattr(owner, "monitor_op") else set())
    for name, value in vars(owner).items():
        if name not in left_out:
            try:
                found[name] = _encoded(value)
            except TypeError:
                continue
    return found


def _encoded(value: Any) -> Any:
    """Returns a value in lists, dicts with texts as keys, arrays and numbers; raises TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": value.copy()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"number": np.asarray(value)}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__ if type(value) in (list, tuple) else "list": [_encoded(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(one)] for key, one in value.items()]}
    raise TypeError(type(value).__name__)


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "array":
        return np.array(held)
    if kind == "number":
        return np.asarray(held)[()]
    if kind == "dict":
        return {_decoded(key): _decoded(one) for key, one in held}
    return (tuple if kind == "tuple" else list)(_decoded(one) for one in held)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)
