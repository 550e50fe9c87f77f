"""What the fork server imports before it forks: what a run imports, in its order."""

from __future__ import annotations

import importlib

from trainer_kit.process.deferred_imports import defer_imports
from trainer_kit.process.gc_freeze import gc_frozen

defer_imports()
with gc_frozen():
    for _module in (
        "tensorflow",
        "keras",
        "trainer_kit.run.launcher",
        "trainer_kit.train",
        "trainer_kit.testing.tiny_task",
    ):
        importlib.import_module(_module)
