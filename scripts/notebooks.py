"""Executes the notebooks of docs/notebooks/: `python -m scripts.notebooks`.

Writes their outputs into the files. Takes about 50 seconds on two cores.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from scripts.source_files import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def main() -> None:
    """Executes all notebooks and writes them."""
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute_notebook(path, Path(folder))
        nbformat.write(notebook, path)


def execute_notebook(path: Path, folder: Path) -> NotebookNode:
    """Executes a notebook, and returns it with its outputs.

    Args:
      path: The notebook.
      folder: The working directory, and the folder for its temporary files.

    Raises:
      CellExecutionError: when a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=120,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return client.execute(env=environment)


if __name__ == "__main__":
    main()
