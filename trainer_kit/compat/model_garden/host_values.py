"""Values that may be on a device, on the host."""

from __future__ import annotations

from typing import Any


def host_value(value: Any) -> Any:
    """Returns what an eager tensor or a variable holds, one over several replicas too; anything else as it is."""
    return value.numpy() if hasattr(value, "numpy") else value
