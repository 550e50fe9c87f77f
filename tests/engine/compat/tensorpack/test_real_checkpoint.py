"""A checkpoint of the real package, which a separate process has written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.tfutils.varmanip import load_checkpoint_vars

from tests.engine.compat.tensorpack.programs import classifier
from tests.fork_server import ForkServer
from trainer_kit.compat.tensorpack import (
    ChainInit,
    SaverRestore,
    SaverRestoreRelaxed,
    SmartInit,
    tfv1,
)
from trainer_kit.compat.tensorpack.installed_package import DOOR


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def real_run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two epochs of the real package."""
    folder = tmp_path_factory.mktemp("real") / "run"
    end = server.run(classifier.main, str(folder))
    assert end.code == 0, end.text
    assert "Training has finished!" in end.text
    return folder


def test_real_checkpoint_predicts_the_same_digits(real_run: Path) -> None:
    program = classifier.Program(DOOR, tfv1)
    stored = np.load(real_run / "predictions.npz")
    path = str(real_run / "model-4")
    values = load_checkpoint_vars(path)
    np.savez(real_run / "values.npz", **values)

    for source in [
        SmartInit(path),
        SaverRestore(f"{path}.index"),
        SaverRestoreRelaxed(path),
        SmartInit(str(real_run / "values.npz")),
        ChainInit([SmartInit(str(real_run / "checkpoint")), SmartInit(values)]),
    ]:
        logits, cost = program.build_predictor(source)(classifier.IMAGES, classifier.LABELS)
        np.testing.assert_array_equal(logits, stored["logits"])
        np.testing.assert_array_equal(cost, stored["cost"])


def continue_training(folder: str, checkpoint: str) -> None:
    classifier.Program(DOOR, tfv1).train(folder, 1, [], SmartInit(checkpoint))


def test_training_continues_from_real_checkpoint(
    server: ForkServer, real_run: Path, tmp_path: Path
) -> None:
    # In a process of its own: on a CPU that is split for tests, sums have another order.
    end = server.run(continue_training, str(tmp_path / "run"), str(real_run / "model-4"))
    assert end.code == 0, end.text

    # The second epoch of the real package.
    expected = load_checkpoint_vars(str(real_run / "model-8"))
    actual = load_checkpoint_vars(str(tmp_path / "run"))
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
