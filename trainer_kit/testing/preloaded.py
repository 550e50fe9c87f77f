"""What the fork server imports before it forks: what a run imports, in its order."""

from __future__ import annotations

import importlib

from trainer_kit.deferred_imports import defer_imports
from trainer_kit.garbage import lasting

defer_imports()
with lasting():
    for _module in ("tensorflow", "keras", "trainer_kit.launcher", "trainer_kit.train", "trainer_kit.testing.tiny"):
        importlib.import_module(_module)
