"""Describes the machine of a measurement. No TensorFlow."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("tensorflow", "keras", "tf-models-official", "torch", "lightning")
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Returns the machine, versions, commit and load, as text and numbers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "commit": _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "cores": cores,
        "GPU": _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).replace("\n", ", ") or "none",
        "load before": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        **versions,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(command: list[str]) -> str:
    """Returns the output of a command; "" if the command does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
