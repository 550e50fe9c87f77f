"""The notebooks of docs/notebooks/ run from the first cell to the last, and print what they claim.

Readers trust a notebook without running it. A change of a name, of a default or of what a run
writes breaks a cell that nobody looks at again, or makes it print something else without an error.
Nothing else in the tests runs trainer_kit in a Jupyter kernel, where the streams, the signals and
the tasks of `__main__` differ from those of a command.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from scripts.source_files import ROOT

FOLDER = ROOT / "docs" / "notebooks"
# What the cells print about the claims of each notebook.
CLAIMS = {
    "first_run": ["as recorded: True", "step 1400/1400"],
    "keras_fit": [
        "exit code -9",
        "400/1200",
        "12 epochs in the history",
        "same weights: True",
        "same history: True",
        "stopped by SIGINT at step",
        "same weights after the stop: True",
    ],
    "sweep_and_compare": ["runs by accuracy, best first", "keras: largest", "as recorded: True"],
}


def read_output(notebook: dict[str, Any]) -> str:
    """Returns what the cells of a notebook have printed."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def test_every_notebook_has_claims() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_prints_what_it_claims(name: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from scripts.notebooks import execute_notebook

    output = read_output(execute_notebook(FOLDER / f"{name}.ipynb", tmp_path))

    assert [claim for claim in CLAIMS[name] if claim not in output] == [], output


@pytest.mark.parametrize("name", CLAIMS)
def test_the_committed_outputs_are_those_of_a_run(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    output = read_output(notebook)

    assert [claim for claim in CLAIMS[name] if claim not in output] == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    # Neither a path of the machine nor a large picture.
    text = path.read_text()
    folders = (str(ROOT), tempfile.gettempdir(), "/tmp/", "/home/")
    assert [folder for folder in folders if folder in text] == []
    assert len(text) < 150_000
