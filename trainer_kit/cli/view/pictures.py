"""Saves the pictures that a flag asks for. matplotlib is imported only here and when drawing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.errors import UsageError, suggest_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(flag: str, path: str) -> None:
    """Checks that matplotlib is installed and can write a picture to `path`.

    Raises:
      UsageError: when it is not, the file type is unknown, or the folder does not exist.
    """
    module_spec = importlib.util.find_spec("matplotlib")
    if module_spec is None:
        raise UsageError(
            f"{flag} needs matplotlib: pip install 'trainer_kit[experiments]', or leave it out"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = []
    for file_type in FigureCanvasBase.get_supported_filetypes():
        suffixes.append(f".{file_type}")
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix and suffix not in suffixes:
        formats = suggest_names(suffix, suffixes)
        message = f"{flag}={path}: matplotlib writes no file {suffix}; {formats}"
        raise UsageError(message)
    folder = target.parent
    if not folder.is_dir():
        message = f"{flag}={path}: there is no folder {folder}; create it"
        raise UsageError(message)


def save_picture(figure: Figure, flag: str, path: str) -> None:
    """Saves a figure, and prints where it is.

    Raises:
      UsageError: when the file cannot be written.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        message = f"{flag}={path}: the picture cannot be saved: {error}"
        raise UsageError(message) from error
    print(f"the picture is in {path}")
