"""Helpers for tests of trainer_kit and of programs that use it.

A tiny task, faults at named moments, and a comparison of two runs. The names are resolved when they
are first used, so that a process that only starts others does not import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The module of each name, below trainer_kit.
_HOME = {
    "CLASSES": "testing.tiny_task",
    "EXAMPLES": "testing.tiny_task",
    "FEATURES": "testing.tiny_task",
    "TinyConfig": "testing.tiny_task",
    "TinyTask": "testing.tiny_task",
    "tiny_arrays": "testing.tiny_task",
    "tiny_experiment": "testing.tiny_task",
    "WRITE_POINTS": "testing.faults",
    "record_points": "testing.faults",
    "stop_at": "testing.faults",
    "compare_runs": "evals.run_comparison",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from trainer_kit.evals.run_comparison import compare_runs as compare_runs
    from trainer_kit.testing.faults import WRITE_POINTS as WRITE_POINTS
    from trainer_kit.testing.faults import record_points as record_points
    from trainer_kit.testing.faults import stop_at as stop_at
    from trainer_kit.testing.tiny_task import CLASSES as CLASSES
    from trainer_kit.testing.tiny_task import EXAMPLES as EXAMPLES
    from trainer_kit.testing.tiny_task import FEATURES as FEATURES
    from trainer_kit.testing.tiny_task import TinyConfig as TinyConfig
    from trainer_kit.testing.tiny_task import TinyTask as TinyTask
    from trainer_kit.testing.tiny_task import tiny_arrays as tiny_arrays
    from trainer_kit.testing.tiny_task import tiny_experiment as tiny_experiment


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'trainer_kit.testing' has no attribute {name!r}; it has: {', '.join(_HOME)}"
        )
    return getattr(importlib.import_module(f"trainer_kit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
