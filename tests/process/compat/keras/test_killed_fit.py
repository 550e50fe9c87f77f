"""A fit that is killed in several epochs and started again ends with the bits of one that was never killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

PROGRAM = "tests.process.compat.keras.killed_fit"


def start(folder: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end, or to its death."""
    command = [sys.executable, "-m", PROGRAM, str(folder), *map(str, arguments)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)


def killed_twice(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program, kills it inside of the third epoch and at the end of the fourth, and runs it to its end."""
    for step in (26, 40):
        assert start(folder, step).returncode == -9
    return start(folder)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, Path]:
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda call: call[0](call[1]), [(start, whole), (killed_twice, killed)]))
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr for one in ended)
    first, second = (json.loads(one.stdout.splitlines()[-1]) for one in ended)
    return first, second, whole, killed


def test_a_killed_fit_has_the_same_history(outputs: tuple[Any, Any, Path, Path]) -> None:
    whole, killed, *_ = outputs
    assert killed["epoch"] == whole["epoch"] == [0, 1, 2, 3, 4]  # early stopping has ended it
    assert killed["history"] == whole["history"]


def test_a_killed_fit_has_the_same_weights(outputs: tuple[Any, Any, Path, Path]) -> None:
    whole, killed, *_ = outputs
    assert killed["weights"] == whole["weights"]


def test_the_last_checkpoint_holds_the_weights_that_are_left(outputs: tuple[Any, Any, Path, Path]) -> None:
    _, killed, _, folder = outputs
    saved = tf.train.load_checkpoint(str(folder / "run"))
    kernel = "model/sequential.Sdense.Skernel/.ATTRIBUTES/VARIABLE_VALUE"
    assert saved.get_tensor(kernel).tobytes().hex() == killed["weights"][0]


def test_batches_go_on_within_the_epoch_of_the_kill(outputs: tuple[Any, Any, Path, Path]) -> None:
    whole, killed, *_ = outputs
    assert whole["batches"] == [*range(10)] * 5
    assert (killed["batches"], killed["losses"]) == (whole["batches"], whole["losses"])


def test_a_csv_log_has_each_epoch_once_after_kills(outputs: tuple[Any, Any, Path, Path]) -> None:
    *_, whole, killed = outputs
    assert (killed / "files" / "log.csv").read_text() == (whole / "files" / "log.csv").read_text()


def test_model_checkpoint_counts_its_batches_over_kills(outputs: tuple[Any, Any, Path, Path]) -> None:
    *_, whole, killed = outputs
    names = [sorted(one.name for one in (folder / "files").iterdir()) for folder in (whole, killed)]
    assert names[1] == names[0]
    assert len(names[0]) > 9


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_tensorboard_has_the_same_curves_after_kills(outputs: tuple[Any, Any, Path, Path], kind: str) -> None:
    *_, whole, killed = outputs
    assert curves(killed / "files" / "board" / kind) == curves(whole / "files" / "board" / kind)


def curves(folder: Path) -> dict[str, dict[int, bytes]]:
    """Returns the points of all curves by name and step; of a step that was repeated, the last one."""
    found: dict[str, dict[int, bytes]] = {}
    for file in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag != "keras":
                    found.setdefault(value.tag, {})[event.step] = value.tensor.SerializeToString()
    return found
