"""Finds variables and tables that have changed since they were first seen, by checksums of their values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class Fingerprints:
    """Remembers a checksum of each value instead of the value, which may be large and never change. Runs eagerly."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Any, int]] = {}

    def watch(self, items: Mapping[str, Any]) -> None:
        """Remembers the current values of items whose names are not watched yet.

        Args:
          items: The variables and mutable hash tables by name.
        """
        for name, item in items.items():
            if name not in self._watched:
                self._watched[name] = (item, _fingerprint(item))

    def items(self) -> list[Any]:
        """Returns the watched variables and tables."""
        return [item for item, _ in self._watched.values()]

    def take_changed(self) -> dict[str, Any]:
        """Returns the items whose values have changed, by name, and stops watching them."""
        changed = {name: item for name, (item, before) in self._watched.items() if _fingerprint(item) != before}
        for name in changed:
            del self._watched[name]
        return changed


def _fingerprint(item: Any) -> int:
    """Returns the checksum of a value; for a variable with a value per replica, that of the first replica."""
    if not isinstance(item, tf.Variable):
        return zlib.crc32(b"".join(_bytes(part.numpy()) for part in item.export()))
    first = (getattr(item, "values", None) or [item])[0]
    return zlib.crc32(_bytes(first.numpy()))


def _bytes(array: Any) -> Any:
    """Returns the bytes of an array, without a copy if it is contiguous; for strings, those of their text."""
    if array.dtype == object:
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
