"""A fit on two workers: callbacks of Keras write their files in the chief's place only."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.builders import free_hosts
from tests.fork_server import ForkServer
from tests.process.compat.keras.worker_fit import EPOCHS, fit

SECONDS = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two workers have trained with callbacks of Keras."""
    path = tmp_path_factory.mktemp("workers")
    hosts = free_hosts(2)
    with ForkServer() as server:
        workers = [server.start(fit, hosts, index, str(path)) for index in (0, 1)]
        ends = [worker.wait(SECONDS) for worker in workers]
    assert [end.code for end in ends] == [0, 0], ends[0].text + ends[1].text
    return path


def test_the_files_of_model_checkpoint_are_whole(folder: Path) -> None:
    model = keras.saving.load_model(folder / f"{EPOCHS}.keras")
    weights = keras.saving.load_model(folder / "1.keras")
    weights.load_weights(folder / f"{EPOCHS}.weights.h5")

    kernel = np.load(folder / "kernel.npy")
    np.testing.assert_array_equal(model.layers[-1].kernel, kernel)
    np.testing.assert_array_equal(weights.layers[-1].kernel, kernel)


def test_a_csv_log_has_each_epoch_once(folder: Path) -> None:
    rows = (folder / "log.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", *map(str, range(EPOCHS))]


def test_tensorboard_writes_one_file(folder: Path) -> None:
    assert len(list((folder / "board" / "train").iterdir())) == 1
