"""`tensorpack.input_source`."""

from __future__ import annotations

from trainer_kit.compat.tensorpack.installed_package import export_names, extend_path

__path__ = extend_path(__path__, "input_source")

__all__ = export_names(globals(), ["input_source", "input_source_base"])
