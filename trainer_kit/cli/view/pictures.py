"""Saves the pictures that a flag asks for. matplotlib is imported only where it draws."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from trainer_kit.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(flag: str) -> None:
    """Raises UsageError unless matplotlib is installed. It is not imported."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{flag} needs matplotlib: pip install matplotlib, or leave it out")


def save_picture(figure: Figure, flag: str, path: str) -> None:
    """Saves a figure, and prints where it is.

    Raises:
      UsageError: when the file cannot be written, or matplotlib does not know its type.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        message = f"{flag}={path}: the picture cannot be saved: {error}"
        raise UsageError(message) from error
    print(f"the picture is in {path}")
