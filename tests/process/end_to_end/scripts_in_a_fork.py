"""Runs scripts in a fork of a process that has imported TensorFlow and trainer_kit, which not every
script may need.
"""

from __future__ import annotations

import runpy
import sys


def run_without_trainer_kit(path: str, other: str) -> None:
    """Runs a script that cannot import trainer_kit, and then another one that can."""
    ours = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "trainer_kit"
    }
    for name in ours:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    runpy.run_path(path, run_name="__main__")
    sys.modules.update(ours)
    runpy.run_path(other, run_name="__main__")
