"""A fit that is killed in several epochs and started again ends with the bits of one that was never
killed.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.fork_server import ForkServer
from tests.process.compat.keras.killed_fit import run_killed, run_to_the_end


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    """What a run has printed and another that was killed in the third epoch and after the fourth;
    their folders.
    """
    whole = tmp_path_factory.mktemp("whole")
    killed = tmp_path_factory.mktemp("killed")
    with ForkServer() as server:
        for step in (26, 40):
            assert server.run(run_killed, str(killed), step).code == -signal.SIGKILL
        # The killed run first, in a new process.
        end = server.run(run_to_the_end, str(killed), str(whole))
    assert end.code == 0, end.text
    killed_output, whole_output = json.loads(end.text.splitlines()[-1])
    return whole_output, killed_output, whole, killed


def test_a_killed_fit_has_the_same_history_weights_and_batches(
    outputs: tuple[Any, Any, Path, Path],
) -> None:
    whole, killed, *_ = outputs
    assert killed == whole
    assert killed["epoch"] == [0, 1, 2, 3, 4]  # early stopping has ended it
    assert killed["batches"] == [*range(10)] * 5


def test_the_last_checkpoint_holds_the_weights_that_are_left(
    outputs: tuple[Any, Any, Path, Path],
) -> None:
    _, killed, _, folder = outputs
    saved = tf.train.load_checkpoint(str(folder / "run"))
    kernel = "model/sequential.Sdense.Skernel/.ATTRIBUTES/VARIABLE_VALUE"

    assert saved.get_tensor(kernel).tobytes().hex() == killed["weights"][0]


def test_a_csv_log_has_each_epoch_once_after_kills(outputs: tuple[Any, Any, Path, Path]) -> None:
    *_, whole, killed = outputs
    assert (killed / "files" / "log.csv").read_text() == (whole / "files" / "log.csv").read_text()


def test_model_checkpoint_counts_its_batches_over_kills(
    outputs: tuple[Any, Any, Path, Path],
) -> None:
    *_, whole, killed = outputs
    names = sorted(os.listdir(whole / "files"))

    assert sorted(os.listdir(killed / "files")) == names
    assert len(names) > 9


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_tensorboard_has_the_same_curves_after_kills(
    outputs: tuple[Any, Any, Path, Path], kind: str
) -> None:
    *_, whole, killed = outputs
    assert read_curves(killed / "files" / "board" / kind) == read_curves(
        whole / "files" / "board" / kind
    )


def read_curves(folder: Path) -> dict[str, dict[int, bytes]]:
    """Returns the points of all curves by name and step; of a repeated step, the last one."""
    points: dict[str, dict[int, bytes]] = {}
    for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag != "keras":
                    points.setdefault(value.tag, {})[event.step] = value.tensor.SerializeToString()
    return points
