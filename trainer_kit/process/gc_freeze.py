"""Freezes objects that live for the whole run, so that garbage collections skip them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Imports what lives as long as the process: garbage collections wait meanwhile, and skip these objects afterwards.

    TensorFlow and what it imports are half a million objects. While they come into being the collector goes through
    them six times, then in each full collection of a run, and several times when the process ends: of 8 s of CPU for
    the import and a short run that is 2. What is garbage by the end of the imports, 2 MB, is never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
