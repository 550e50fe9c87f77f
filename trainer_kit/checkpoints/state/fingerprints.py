"""Which variables and tables have changed since they were looked at first, by checksums of their values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class Fingerprints:
    """Remembers a checksum of each value, and not the value: what is watched may be large, and never change. Eager."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Any, int]] = {}

    def watch(self, items: Mapping[str, Any]) -> None:
        """Takes the values as they are now, except those of names that are watched already.

        Args:
          items: variables and mutable hash tables by name.
        """
        for name, item in items.items():
            if name not in self._watched:
                self._watched[name] = (item, _fingerprint(item))

    def items(self) -> list[Any]:
        """Returns what is watched."""
        return [item for item, _ in self._watched.values()]

    def take_changed(self) -> dict[str, Any]:
        """Returns what has another value than at first, by name; it is not watched any more."""
        changed = {name: item for name, (item, before) in self._watched.items() if _fingerprint(item) != before}
        for name in changed:
            del self._watched[name]
        return changed


def _fingerprint(item: Any) -> int:
    """Returns a checksum; of a variable with a value on each replica, that of the first one."""
    if not isinstance(item, tf.Variable):
        return zlib.crc32(b"".join(_bytes(part.numpy()) for part in item.export()))
    first = (getattr(item, "values", None) or [item])[0]
    return zlib.crc32(_bytes(first.numpy()))


def _bytes(array: Any) -> Any:
    """Returns the bytes of an array, without a copy where they lie in one piece; of strings, those of their text."""
    if array.dtype == object:
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
