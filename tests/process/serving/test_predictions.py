"""Predictions by real processes: kills at any moment, and workers that share the parts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest

import trainer_kit
from tests.builders import wait_until
from tests.fork_server import ForkServer
from trainer_kit.serving import prediction

ROWS = 4_000


def predict_rows(output: str, worker: int = 0, workers: int = 1) -> None:
    """Predicts all rows, in parts of 40."""
    prediction._PART_BATCHES = 10
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    data = {"x": np.random.default_rng(0).random((ROWS, 3)), "key": np.arange(ROWS)}
    trainer_kit.predict(model, data, output, batch_size=4, worker=worker, workers=workers)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


def test_a_killed_prediction_loses_and_doubles_no_row(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(predict_rows, str(tmp_path / "whole.npz")).code == 0
    path = tmp_path / "killed.npz"

    def has_part(number: int) -> bool:
        return any(tmp_path.glob(f"*.parts-*/part-{number:06}.npz"))

    for number in (0, 20, 60):
        child = server.start(predict_rows, str(path))
        wait_until(partial(has_part, number), 60)
        child.kill()
        assert child.wait().code == -signal.SIGKILL
        assert not path.exists()
    assert server.run(predict_rows, str(path)).code == 0

    assert path.read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert np.load(path)["key"].tolist() == list(range(ROWS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["killed.npz", "whole.npz"]


def test_two_workers_write_the_file_of_a_single_one(server: ForkServer, tmp_path: Path) -> None:
    single = tmp_path / "single.csv"
    assert server.run(predict_rows, str(single)).code == 0
    shared = tmp_path / "shared.csv"

    workers = [server.start(predict_rows, str(shared), number, 2) for number in range(2)]

    assert [worker.wait().code for worker in workers] == [0, 0]
    assert shared.read_bytes() == single.read_bytes()
