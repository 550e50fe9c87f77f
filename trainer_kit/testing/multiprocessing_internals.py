"""The private names of Python's multiprocessing that the fork server needs. No other module may use one.

tests/testing/test_multiprocessing_internals.py fails when a name is gone or has changed.
"""

from __future__ import annotations

import contextlib
from multiprocessing import forkserver


def stop_fork_server() -> None:
    """Ends this process's fork server, if there is one; the next child starts another.

    Publicly it ends with this process only. Without the names nothing ends, and children import what the server has
    not imported by themselves: slower, and otherwise the same.
    """
    with contextlib.suppress(AttributeError):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
