"""What the fork server imports before it forks: what a run imports, in its order."""

from __future__ import annotations

import importlib

for _module in (
    "tensorflow",
    "keras",
    "trainer_kit.run.launcher",
    "trainer_kit.train",
    "trainer_kit.testing.tiny_task",
    "tensorboard.plugins.hparams.api",
):
    importlib.import_module(_module)
