"""Writes pictures with matplotlib, which is imported only here and only when a picture is drawn."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from trainer_kit.errors import UsageError, suggest_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(path: str) -> None:
    """Checks the value of --picture before the work.

    Raises:
      UsageError: when matplotlib is missing or has no such format, or the folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--picture needs matplotlib: pip install 'trainer_kit[experiments]', or leave it out"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    file_types = FigureCanvasBase.get_supported_filetypes()
    _, ending = os.path.splitext(path)
    suffix = ending.lower()
    if suffix and suffix[1:] not in file_types:
        suffixes = [f".{name}" for name in file_types]
        formats = suggest_names(suffix, suffixes)
        raise UsageError(f"--picture={path}: matplotlib writes no file {suffix}; {formats}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"--picture={path}: there is no folder {folder}; create it")


def save_picture(figure: Figure, path: str) -> None:
    """Writes a figure to the value of --picture.

    Raises:
      UsageError: when it cannot be written.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--picture={path}: the picture cannot be saved: {error}") from error
