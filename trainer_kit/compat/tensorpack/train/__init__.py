"""`tensorpack.train`."""

from __future__ import annotations

import importlib

from trainer_kit.compat.tensorpack.installed_package import export_names, extend_path

__path__ = extend_path(__path__, "train")

# By name, since it imports modules of this package.
importlib.import_module(f"{__name__}.checked_entries").check_entries()

__all__ = export_names(
    globals(),
    ["base", "config", "interface", "model_desc", "earlier_names", "tower", "trainers"],
)
