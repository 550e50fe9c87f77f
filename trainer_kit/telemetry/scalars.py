"""Defines which reported values count as single numbers, for the whole package.

Uses neither TensorFlow nor NumPy: only a value's shape and the kind of its dtype are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LOSS = "training_loss"
# NumPy's kinds of bool, signed and unsigned integer, and float. bfloat16 and the 8-bit floats call
# themselves "V".
_NUMBER_KINDS = frozenset("biufV")


def as_scalar(value: Any) -> float | None:
    """Returns `value` as a float, or None if it is not a single number.

    A number is a Python or NumPy bool, int or float, or an array (an eager tensor) of numbers with
    the shape (). Text is not a number, even if it looks like one, and neither is an array of shape
    (1,).
    """
    if isinstance(value, (bool, int, float)):
        return _to_float(value)
    if isinstance(value, (str, bytes)):
        return None

    # Only a number of NumPy or TensorFlow has the shape ().
    shape = tuple(getattr(value, "shape", (0,)))
    if shape != ():
        return None
    array = value.numpy() if hasattr(value, "numpy") else value
    dtype = getattr(array, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind not in _NUMBER_KINDS:
        return None
    return _to_float(array)


def flatten_scalars(values: Mapping[str, object], separator: str = "/") -> dict[str, float]:
    """Returns the scalars of nested `values` in their order.

    The names of groups and scalars are joined by `separator`.

    Other values (arrays, lists, text, None) are left out.
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            group = flatten_scalars(value, separator)
            for inner_name, number in group.items():
                flat[f"{name}{separator}{inner_name}"] = number
            continue
        scalar = as_scalar(value)
        if scalar is not None:
            flat[str(name)] = scalar
    return flat


def to_json_number(value: float) -> float | str:
    """Returns `value` in a form for strict JSON.

    A value that is not finite is returned as the text "nan", "inf" or "-inf".
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def from_json_number(value: Any) -> float:
    """Returns the number that `to_json_number` encoded. NaN for a value that is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def get_training_loss(logs: Mapping[str, Any]) -> float:
    """Returns the training loss from the logs of a loop. 0 if the logs contain none.

    With several tasks, it is the first loss that is not finite, else the largest.
    """
    if LOSS in logs:
        return float(logs[LOSS])

    scalars = flatten_scalars(logs)
    suffix = f"/{LOSS}"
    losses = []
    for name, loss in scalars.items():
        if not name.endswith(suffix):
            continue
        if not math.isfinite(loss):
            return loss
        losses.append(loss)
    return max(losses, default=0.0)
