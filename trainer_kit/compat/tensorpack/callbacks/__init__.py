"""`tensorpack.callbacks`."""

from __future__ import annotations

from trainer_kit.compat.tensorpack.installed_package import export_names, extend_path

__path__ = extend_path(__path__, "callbacks")

__all__ = export_names(
    globals(),
    [
        *("base", "concurrency", "graph", "group", "hooks", "inference", "inference_runner"),
        *("monitor", "param", "prof", "saver", "misc", "steps", "summary", "trigger"),
    ],
)
