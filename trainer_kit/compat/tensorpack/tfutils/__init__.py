"""`tensorpack.tfutils`: scopes, summaries, gradients, and the loading of variables."""

from __future__ import annotations

from trainer_kit.compat.tensorpack.installed_package import export_names, extend_path

__path__ = extend_path(__path__, "tfutils")

__all__ = export_names(globals(), ["common", "sessinit", "argscope"])

from trainer_kit.compat.tensorpack.tfutils.tower import (
    TowerContext,
    get_current_tower_context,
)

__all__ += [
    "TowerContext",
    "get_current_tower_context",
    # Submodules, which `import *` imports.
    "sessinit",
    "summary",
    "optimizer",
    "sesscreate",
    "gradproc",
    "varreplace",
    "tower",
]
