"""Runs the programs of this folder in a process, which may be killed in a save."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from trainer_kit.testing import stop_at

_FOLDER = Path(__file__).parent / "programs"


def run_program(name: str, folder: str, moment: str = "") -> None:
    """Runs a program. See its `--signal` for the moment, which may also be `save:2`."""
    arguments = [name, folder]
    if moment.startswith("save:"):
        stop_at("checkpoint.save", int(moment.removeprefix("save:")))
    elif moment:
        arguments.append(f"--signal={moment}")
    sys.argv = arguments
    runpy.run_path(str(_FOLDER / f"{name}.py"), run_name="__main__")
