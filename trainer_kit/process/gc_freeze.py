"""Freezes objects that live for the whole run, so that garbage collections skip them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Imports inside this block run without garbage collections, and later collections skip their objects.

    TensorFlow and its imports are half a million objects. The collector would go through them six times during the
    imports, then in each full collection of a run, and several times when the process ends: 2 of the 8 s of CPU of the
    imports and a short run. Garbage that the imports leave, 2 MB, is never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
