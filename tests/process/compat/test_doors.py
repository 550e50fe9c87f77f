"""docs/guides/doors.md: the six programs run as they are printed, and train alike."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.examples import read_page
from scripts.source_files import ROOT
from tests.builders import json_lines
from tests.fork_server import ForkServer
from tests.process.docs.page_process import run_in_background

PAGE = ROOT / "docs" / "guides" / "doors.md"
DOORS = {
    "native": "runs/native",
    "model_garden": "runs/garden",
    "tensorpack": "runs/tensorpack",
    "pipelines": "runs/pipelines/checkpoints",
    "keras_fit": "runs/keras",
    "train_loop": "runs/loop",
}
STEPS = 50
BATCH = 30
RATE = 0.2
TOLERANCE = 1e-6


def run_command(command: str) -> None:
    """Does what a command does in its working directory."""
    sys.path.insert(0, ".")
    run_in_background(command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the page have run, each in a process of its own."""
    folder = tmp_path_factory.mktemp("doors")
    page = read_page(PAGE.name, PAGE.read_text())
    for name, text in page.files.items():
        (folder / name).write_text(text)

    with ForkServer() as server:
        commands = re.findall(r"^python .*", PAGE.read_text(), re.MULTILINE)
        children = [server.start(run_command, command, folder=str(folder)) for command in commands]
        for command, child in zip(commands, children, strict=True):
            ended = child.wait()
            assert ended.code == 0, f"{command}\n{ended.text}"
    return folder


def read_losses(folder: Path, door: str) -> list[float]:
    """Returns the training loss of each step."""
    records = json_lines(folder / DOORS[door] / "metrics.jsonl")
    reports = [record for record in records if record["kind"] == "train"]
    assert [report["step"] for report in reports] == list(range(1, STEPS + 1))
    return [report["metrics"]["training_loss"] for report in reports]


@pytest.fixture(scope="module")
def expected_losses(folder: Path) -> np.ndarray:
    """The losses of the problem, by NumPy in float64."""
    problem = runpy.run_path(str(folder / "shared_digits.py"))
    kernel, bias, last_kernel, last_bias = (array.astype("float64") for array in problem["weights"])
    examples = np.arange(BATCH)
    losses = []
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        pixels = problem["x"][batch].astype("float64")
        labels = problem["y"][batch]

        hidden = np.maximum(pixels @ kernel + bias, 0)
        scores = np.exp(hidden @ last_kernel + last_bias)
        shares = scores / scores.sum(axis=1, keepdims=True)
        losses.append(-np.log(shares[examples, labels]).mean())

        logit_gradient = shares.copy()
        logit_gradient[examples, labels] -= 1
        logit_gradient /= BATCH
        hidden_gradient = logit_gradient @ last_kernel.T * (hidden > 0)
        last_kernel -= RATE * hidden.T @ logit_gradient
        last_bias -= RATE * logit_gradient.sum(axis=0)
        kernel -= RATE * pixels.T @ hidden_gradient
        bias -= RATE * hidden_gradient.sum(axis=0)
    return np.array(losses)


@pytest.mark.parametrize("door", DOORS)
def test_each_door_reports_the_losses_of_numpy(
    folder: Path, expected_losses: np.ndarray, door: str
) -> None:
    losses = read_losses(folder, door)

    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    assert losses[-1] < losses[0] / 2


def test_all_doors_report_the_same_losses(folder: Path) -> None:
    losses = np.array([read_losses(folder, door) for door in DOORS])

    differences = losses.max(axis=0) - losses.min(axis=0)

    assert (differences <= TOLERANCE * losses.min(axis=0)).all()


def test_a_program_of_tensorpack_that_has_ended_asks_nothing(folder: Path) -> None:
    with ForkServer() as server:
        ended = server.run(run_command, "python tensorpack_digits.py", folder=str(folder))

    assert ended.code == 0, ended.text
    assert "nothing to do: the run in runs/tensorpack has ended" in ended.text
