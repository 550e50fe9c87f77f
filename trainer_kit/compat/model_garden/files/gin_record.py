"""The record of gin's bindings beside a run."""

from __future__ import annotations

import logging
import os

from trainer_kit.compat.model_garden.files.text_files import write_text
from trainer_kit.config.sources.gin_source import operative_gin

_LOG = logging.getLogger(__name__)


def save_gin_config(filename_suffix: str, model_dir: str) -> None:
    """Writes the gin bindings and defaults that have been used so far to `operative_config.<suffix>.gin`.

    Args:
      filename_suffix: the mode, usually.
      model_dir: folder of the file; made if it is missing.

    Raises:
      StorageError: when the file cannot be written.
    """
    path = os.path.join(model_dir, f"operative_config.{filename_suffix}.gin")
    write_text(path, operative_gin())
    _LOG.info("gin's bindings are in %s", path)
